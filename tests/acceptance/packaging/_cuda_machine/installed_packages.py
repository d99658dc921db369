"""Compares the installed packages with the pins of a requirements file; prints those that differ as JSON."""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version


def main() -> None:
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith(("#", "-"))]
    missing = {}
    for pin in pins:
        try:
            found = version(pin.name)
        except PackageNotFoundError:
            found = "not installed"
        if found == "not installed" or Version(found) not in pin.specifier:
            missing[pin.name] = f"{found} instead of {pin.specifier}"
    build = distribution("torch").read_text("../torch/version.py") or ""
    if "cuda: Optional[str] = '" not in build:
        missing["torch.version.cuda"] = "None"
    print(json.dumps({"packages": len(pins), "missing": missing}))


if __name__ == "__main__":
    main()
