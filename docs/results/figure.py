"""Draw by how many percent the losses of up to five presets differ from gqa's, in seven settings.

    python -m docs.results.figure

reads the records next to this file and writes settings.svg. A marker is hollow if a run of the
preset or of gqa came from a working tree with uncommitted changes.
"""

from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from tools.compare.comparison import judge_losses, sort_runs
from tools.compare.plots import COLORS, to_svg
from tools.compare.runs import read_records

FOLDER = Path(__file__).parent
SETTINGS = {
    "stories\ndim 64\ntoday": "text-64",
    "stories\n64\nearlier": "text",
    "stories\n96\nearlier": "text-96",
    "code\n64": "ladder-64",
    "code\n96": "ladder-96",
    "code\n128": "ladder-128",
    "code\n192": "ladder-192",
}
PRESETS = ("kda", "gdn_sigmoid", "window_nope", "gated", "gpt_oss")


def main() -> None:
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.axhline(0.0, color="gray", linewidth=1)
    for place, folder in enumerate(SETTINGS.values()):
        comparison = sort_runs([*read_records(FOLDER / folder).values()])
        verdicts, _ = judge_losses(comparison, margin=0.01)
        baseline = fmean(run.loss for run in comparison.groups["gqa"])
        for number, name in enumerate(PRESETS):
            if name not in verdicts:
                continue
            runs = [*comparison.groups[name], *comparison.groups["gqa"]]
            is_committed = not any("dirty" in run.commit for run in runs)
            color = COLORS[number]
            at = place + 0.12 * (number - 2)
            # Percent of gqa's loss.
            percents = [100 * value / baseline for value in verdicts[name][:3]]
            axes.plot([at] * 2, percents[1:], color=color, linewidth=1)
            fill = color if is_committed else "white"
            axes.plot(at, percents[0], "o", color=color, markerfacecolor=fill, markersize=5)
    for number, name in enumerate(PRESETS):
        axes.plot([], [], "o", color=COLORS[number], markersize=5, label=name)
    axes.set_xticks(range(len(SETTINGS)), SETTINGS)
    axes.set_ylabel("difference from gqa, %")
    figure.legend(loc="outside upper center", ncols=len(PRESETS), frameon=False)
    (FOLDER / "settings.svg").write_text(to_svg(figure, "settings"), encoding="utf-8")


if __name__ == "__main__":
    main()
