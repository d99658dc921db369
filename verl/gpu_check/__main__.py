"""One stage in this process: `python -m verl.gpu_check STAGE CONTEXT RESULT PARENT`; see `runner`."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

from verl.child_process import end_with_parent
from verl.errors import VerlError
from verl.gpu_check.stage import Checks, Context, StageSkipped, State
from verl.gpu_check.stages import STAGES


def main() -> None:
    """Run the stage, and write how it ended."""
    name, context_file, result_file, parent = sys.argv[1:]
    end_with_parent(int(parent))
    given = json.loads(Path(context_file).read_text(encoding="utf-8"))
    checks = Checks()
    try:
        STAGES[name].load()(Context(**given | {"folder": Path(given["folder"])}), checks)
        state, text = State.OK, checks.describe()
        if not checks.count:
            state, text = State.FAILED, "nothing was checked"
    except StageSkipped as reason:
        state, text = State.SKIPPED, str(reason)
    except Exception as error:  # noqa: BLE001 - the process boundary: whatever goes wrong is the result of the stage
        traceback.print_exc()
        state = State.FAILED
        text = str(error) if isinstance(error, VerlError) else f"{type(error).__name__}: {error}"
    result = {"state": state, "text": text, "checks": checks.count, "figures": checks.figures}
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
