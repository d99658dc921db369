"""Write prompts and responses of GSM8K for `verl sft`, from the files that `examples/data_preprocess/gsm8k.py` writes.

python examples/data_preprocess/gsm8k.py --local_dir ~/data/gsm8k
python examples/sft/gsm8k_sft.py --source ~/data/gsm8k --local_dir ~/data/gsm8k_sft
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=Path("~/data/gsm8k"))
    parser.add_argument("--local_dir", type=Path, default=Path("~/data/gsm8k_sft"))
    options = parser.parse_args()
    target = options.local_dir.expanduser()
    target.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        rows = pq.read_table(options.source.expanduser() / f"{split}.parquet").to_pylist()
        # Prompts are lists of messages: the chat template adds the header of the response.
        pairs = [{"prompt": row["prompt"], "response": row["extra_info"]["answer"]} for row in rows]
        pq.write_table(pa.Table.from_pylist(pairs), target / f"{split}.parquet")


if __name__ == "__main__":
    main()
