"""Print the table of docs/gpu.md from what the tests of presets without a GPU have measured.

pytest tests/gpu/fake_cuda_cases.py --junitxml=.cache/fake.xml
pytest -m triton
python -m tests.gpu.gpu_table .cache/triton.jsonl --fake .cache/fake.xml
"""

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from tests.conftest import VARIANTS
from tests.gpu.lowering import GPUS

NOT_RUN = "not run"
COLUMNS = (
    "preset",
    "eager, fake CUDA",
    "kernels",
    *GPUS,
    "launches, training",
    "launches, decoding",
    "interpreted",
)


def read_reports(path: Path) -> dict[tuple, dict]:
    """Reports of the default options by preset, step and GPU; later lines add to earlier ones."""
    reports = {}
    for line in path.read_text().splitlines():
        report = json.loads(line)
        preset, *options = report.get("overrides", [None])
        names = {option.partition("=")[0] for option in options}
        if preset is None or not names <= {"model", "model.depth", "context", "micro_batch"}:
            continue
        name = preset.removeprefix("attention=")
        key = (name, report.get("step", "interpreted"), report.get("gpu"))
        reports[key] = reports.get(key, {}) | report
    return reports


def read_passed(path: Path) -> dict[str, str]:
    """For each preset how many of its tests have passed, from a report of pytest."""
    passed = Counter()
    total = Counter()
    for case in ElementTree.parse(path).iter("testcase"):
        words = re.findall(r"\w+", case.get("name").partition("[")[2])
        for preset in set(words) & set(VARIANTS):
            total[preset] += 1
            passed[preset] += len(case) == 0  # neither failure nor skip
    return {preset: f"{passed[preset]} of {total[preset]} tests" for preset in total}


def row(preset: str, reports: dict[tuple, dict], passed: dict[str, str]) -> list[str]:
    """The cells of a preset."""
    steps = ("training", "decoding")
    cells = [f"`{preset}`", passed.get(preset, NOT_RUN)]
    on_sm_90 = [reports.get((preset, step, "sm_90"), {}) for step in steps]
    kernels = [str(report.get("kernels", NOT_RUN)) for report in on_sm_90]
    cells.append(" + ".join(dict.fromkeys(kernels)) if NOT_RUN in kernels else " + ".join(kernels))
    for gpu in GPUS:
        built = [reports.get((preset, step, gpu), {}) for step in steps]
        cells.append(NOT_RUN)
        if all("shared_memory" in report for report in built):
            shared = max(report["shared_memory"] for report in built) / 1024
            stack = max(report["stack"] for report in built)
            cells[-1] = f"{shared:.0f} KiB, {stack} B"
    for report in on_sm_90:
        cells.append(NOT_RUN)
        if "each_layer" in report:
            layer = sum(report["each_layer"].values())
            other = sum(report["other"].values())
            cells[-1] = f"{layer:g} + {other:g}"
    interpreted = reports.get((preset, "interpreted", None))
    cells.append(NOT_RUN if interpreted is None else f"{max(interpreted['errors'].values()):.0e}")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("reports", type=Path, help="JSON lines of tests/gpu/test_triton.py")
    parser.add_argument("--fake", type=Path, help="JUnit XML of tests/gpu/fake_cuda_cases.py")
    args = parser.parse_args()
    reports = read_reports(args.reports)
    passed = {} if args.fake is None else read_passed(args.fake)
    rows = [list(COLUMNS), ["---"] * len(COLUMNS)]
    rows += [row(preset, reports, passed) for preset in VARIANTS]
    for cells in rows:
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
