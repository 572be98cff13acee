"""Test that a search asks Optuna for each member, reports how each ended, and prunes members."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import labkit as lk
from labkit.cli import sweep as cli
from labkit.cli.app import app
from labkit.cli.sweep import SAMPLERS
from labkit.common.errors import InvalidInput, Pruned
from labkit.figures.runs.parameter_effects import search_history
from labkit.jobs.log import RunLog
from labkit.jobs.sweep import manifest, sweep_plan
from labkit.jobs.sweep.grid import Draw
from labkit.jobs.sweep.sweep_plan import Search, SweepMember, of_record
from labkit.jobs.sweep.trials import PRUNERS, Trials
from labkit.records import store
from labkit.records.analysis.curves import folders, search_results
from labkit.records.stream import FOLDER, PRUNED, StreamReader, StreamWriter

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "says_its_parameters.ipynb"
AXES = {"rate": Draw(1e-4, 1e-1, log=True), "mode": ("ring", "tree"), "count": (1, 2, 3, 4)}


def search(**changes: Any) -> Search:
    fields: dict[str, Any] = {"objectives": {"accuracy": True}, "trials": 8, "prune": None}
    return Search(**fields | {"sampler": "tpe", "seed": 0, "axes": {}, "fixed": {}} | changes)


def begun(root: Path, **changes: Any) -> Trials:
    found, _ = sweep_plan.make_search(NOTEBOOK, AXES, search(**changes))
    assert found.search is not None
    return Trials(manifest.create(root, "sweep", found), found, found.search)


def resumed(trials: Trials) -> Trials:
    """Return the same trials as a later process restores them from the sweep's record."""
    record = manifest.read(trials.folder)
    given = of_record(record["search"])
    return Trials(trials.folder, sweep_plan.again(NOTEBOOK, record["members"], given), given)


def end(trials: Trials, member: SweepMember, accuracy: float) -> None:
    """Complete a member of the sweep with this accuracy."""
    job = manifest.queue(trials.folder, trials.plan, member)
    log = RunLog(store.new_run_directory(job, "run"), {})
    log.add({"accuracy": accuracy})
    store.complete(log.run.path)
    store.complete(job)
    assert trials.tell(member, "completed") is None


def test_members_have_values_of_their_axes_as_the_notebook_declares_them(tmp_path: Path) -> None:
    trials = begun(tmp_path, fixed={"fast": "true"})
    for number in range(1, 4):
        member = trials.ask()
        values = member.values
        assert 1e-4 <= values["rate"] <= 1e-1
        assert values["rate"] == float(f"{values['rate']:.4g}")
        assert (values["mode"] in ("ring", "tree"), values["count"] in range(1, 5)) == (True, True)
        assert values["fast"] is True
        assert member.folder.startswith(f"{number:03}_rate=")
    listed = manifest.read(trials.folder)["members"]
    assert [each["folder"] for each in listed] == [each.folder for each in trials.plan.members]


def test_a_search_chooses_zipped_values_together(tmp_path: Path) -> None:
    axes = {"count": (1, 2, 3), "rate": (0.1, 0.2, 0.3), "mode": ("ring", "tree")}
    found, _ = sweep_plan.make_search(NOTEBOOK, axes, search(), [["count", "rate"]])
    assert found.search is not None
    trials = Trials(manifest.create(tmp_path, "sweep", found), found, found.search)
    members = [trials.ask() for _ in range(3)] + [resumed(trials).ask() for _ in range(3)]
    assert all(m.values["rate"] == m.values["count"] / 10 for m in members)


def test_what_members_came_to_steers_those_after_them(tmp_path: Path) -> None:
    trials = begun(tmp_path, trials=40)
    while trials.left:
        member = trials.ask()
        end(trials, member, 0.9 if member.values["mode"] == "tree" else 0.1)
    late = [member.values["mode"] for member in trials.plan.members[20:]]
    assert late.count("tree") >= 15  # a random search would choose about 10
    [(_, values)] = trials.best()
    assert values == {"accuracy": 0.9}


def test_several_objectives_have_several_best_members(tmp_path: Path) -> None:
    trials = begun(tmp_path, objectives={"accuracy": True, "cost": False}, trials=3)
    results = [(0.9, 5.0), (0.8, 1.0), (0.7, 2.0)]  # the last is worse than the second in both
    members = []
    for accuracy, cost in results:
        members.append(trials.ask())
        job = manifest.queue(trials.folder, trials.plan, members[-1])
        log = RunLog(store.new_run_directory(job, "run"), {})
        log.add({"accuracy": accuracy, "cost": cost})
        store.complete(log.run.path)
        store.complete(job)
        assert trials.tell(members[-1], "completed") is None
    assert sorted(resumed(trials).best()) == [
        (members[0].folder, {"accuracy": 0.9, "cost": 5.0}),
        (members[1].folder, {"accuracy": 0.8, "cost": 1.0}),
    ]
    accuracy, cost = search_results(trials.folder)
    assert (accuracy.metric, list(accuracy.trials["best"])) == ("accuracy", [0.9, 0.9, 0.9])
    assert (cost.metric, list(cost.trials["best"])) == ("cost", [5.0, 1.0, 1.0])
    assert "best cost 1" in search_history(cost).alt


def test_enqueued_values_are_tried_first_and_once(tmp_path: Path) -> None:
    axes = {**AXES, "rate": (0.1, 0.2), "sizes": ([1], [2])}
    enqueued = ({"mode": "tree", "count": "3"}, {"rate": "0.2", "sizes": "[2]"})
    found, _ = sweep_plan.make_search(
        NOTEBOOK, axes, search(enqueued=enqueued), [["rate", "sizes"]]
    )
    assert found.search is not None
    trials = Trials(manifest.create(tmp_path, "sweep", found), found, found.search)
    first, second = trials.ask().values, resumed(trials).ask().values
    assert (first["mode"], first["count"]) == ("tree", 3)
    assert (second["rate"], second["sizes"]) == (0.2, [2])
    assert len(resumed(trials)._study.get_trials()) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mode=tree,rate=2", "--enqueue sets rate to 2.0, which the search does not try"),
        ("count=9", "allowed: [1, 2, 3, 4]"),
        ("count=many", "count = 'many' is not int"),
        ("word=x", "--enqueue sets word, which is not searched; allowed: rate, mode, count"),
        ("mode", "is not of the form a=1,b=2"),
        ("mode=tree,mode=ring", "with each name once"),
    ],
)
def test_values_that_cannot_be_enqueued_are_refused(text: str, words: str) -> None:
    def enqueue() -> None:
        enqueued = (sweep_plan.read_trial(text),)
        sweep_plan.make_search(NOTEBOOK, AXES, search(enqueued=enqueued))

    with pytest.raises(InvalidInput) as refused:
        enqueue()
    assert words in str(refused.value)


def test_a_record_of_an_older_search_has_one_objective() -> None:
    record = {k: v for k, v in search().to_json().items() if k not in ("objectives", "enqueued")}
    older = of_record(record | {"metric": "loss", "maximize": False})
    assert (dict(older.objectives), older.enqueued) == ({"loss": False}, ())


def test_a_search_goes_on_where_it_ended(tmp_path: Path) -> None:
    trials = begun(tmp_path, trials=4)
    completed, failed, stopped, untold = (trials.ask() for _ in range(4))
    end(trials, completed, 0.5)
    trials.tell(failed, "failed")
    trials.tell(stopped, "interrupted")
    end(trials, untold, 0.7)  # Optuna learns of it below, from the record, as after a killed sweep
    again = resumed(trials)
    assert [member.folder for member in again.open] == [stopped.folder]
    assert (again.done, again.left) == (2, 1)  # a new trial replaces the failed one
    assert again.ask().folder.startswith("005_")


def test_a_member_that_ended_untold_is_told_when_the_search_goes_on(tmp_path: Path) -> None:
    trials = begun(tmp_path, trials=2)
    member = trials.ask()
    job = manifest.queue(trials.folder, trials.plan, member)
    log = RunLog(store.new_run_directory(job, "run"), {})
    log.add({"accuracy": 0.7})
    store.complete(log.run.path)
    store.complete(job)
    again = resumed(trials)
    assert (again.open, again.done) == ([], 1)
    assert again.best() == [(member.folder, {"accuracy": 0.7})]


def test_a_result_that_nobody_has_is_said(tmp_path: Path) -> None:
    trials = begun(tmp_path, objectives={"beauty": False})
    member = trials.ask()
    store.complete(manifest.queue(trials.folder, trials.plan, member))
    assert "beauty" in str(trials.tell(member, "completed"))
    assert trials.done == 0


def test_the_objective_is_that_of_the_last_run_of_a_notebook(tmp_path: Path) -> None:
    trials = begun(tmp_path)
    member = trials.ask()
    job = manifest.queue(trials.folder, trials.plan, member)
    for name, accuracy in (("first", 0.9), ("second", 0.4)):
        log = RunLog(store.new_run_directory(job, name), {})
        log.add({"accuracy": accuracy})
        store.complete(log.run.path)
    store.complete(job)
    trials.tell(member, "completed")
    assert list(search_results(trials.folder)[0].trials["value"]) == [0.4]


def tells(trials: Trials, member: SweepMember, *values: float) -> Path:
    """Write a member's live file with these accuracies, and return its live folder."""
    job = manifest.queue(trials.folder, trials.plan, member)
    live = store.new_run_directory(job, "run") / FOLDER
    live.mkdir()
    told = [{"step": step, "val_accuracy": value} for step, value in enumerate(values, 1)]
    StreamWriter(live, 0, store.this_process()).write("epoch", told)
    trials.watch(member)
    return live


@pytest.mark.parametrize("pruner", ["median", "halving"])
def test_a_member_that_is_worse_than_others_at_the_same_step_shall_end(
    tmp_path: Path, pruner: str
) -> None:
    trials = begun(tmp_path, prune=pruner, trials=10)
    for _ in range(5):  # Optuna never prunes its first five trials
        member = trials.ask()
        tells(trials, member, 0.5, 0.6, 0.7)
        log = RunLog(store.new_run_directory(trials.folder / member.folder, "result"), {})
        log.add({"accuracy": 0.7})
        store.complete(log.run.path)
        trials.tell(member, "completed")
    worse, better = (tells(trials, trials.ask(), 0.5, value) for value in (0.1, 0.9))
    assert StreamReader(worse).is_prune_requested()
    assert not StreamReader(better).is_prune_requested()
    trials.tell(trials.plan.members[-2], "pruned")
    assert trials.states["PRUNED"] == 1
    shown = search_results(trials.folder)[0].trials
    assert list(shown["state"]) == ["complete"] * 5 + ["pruned"]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_each_sampler_asks_other_members_also_when_it_goes_on(tmp_path: Path, sampler: str) -> None:
    trials = begun(tmp_path, sampler=sampler, prune="hyperband")
    for _ in range(2):
        for _ in range(3):
            end(trials, trials.ask(), 0.5)
        trials = resumed(trials)
    assert len({member.values["rate"] for member in trials.plan.members}) == 6


def test_optuna_has_each_pruner_and_old_records_mean_the_median(tmp_path: Path) -> None:
    assert tuple(PRUNERS) == cli.PRUNERS
    for pruner in cli.PRUNERS:
        assert begun(tmp_path / pruner, prune=pruner).states.total() == 0
    record = search().to_json()
    assert [of_record(record | {"prune": said}).prune for said in (True, False)] == ["median", None]


def test_of_several_runs_the_first_by_name_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = begun(tmp_path, prune="median")
    member = trials.ask()
    live = tells(trials, member, 0.5)
    other = live.parent.with_name("a-run") / FOLDER
    other.mkdir(parents=True)
    plain = Path.glob
    monkeypatch.setattr(Path, "glob", lambda *of: sorted(plain(*of), reverse=True))
    again = resumed(trials)
    again.watch(member)
    assert again._readers[member.folder].folder == other


def test_a_logged_run_that_shall_end_raises(tmp_path: Path) -> None:
    log = RunLog(store.new_run_directory(tmp_path, "run"), {})
    log.add({"accuracy": 0.1}, step=1)
    StreamReader(log.run.path / FOLDER).stop(PRUNED)
    with pytest.raises(Pruned, match="pruned after 2 steps"):
        log.add({"accuracy": 0.2}, step=2)


@pytest.mark.slow
def test_the_report_of_a_search_shows_its_trials_and_what_mattered(tmp_path: Path) -> None:
    trials = begun(tmp_path, trials=4)
    for accuracy in (0.3, 0.8, 0.5, 0.6):
        end(trials, trials.ask(), accuracy)
    runs = lk.load_runs(trials.folder)
    [folder] = folders(runs)
    found = search_results(folder)[0]
    assert list(found.trials["best"]) == [0.3, 0.8, 0.8, 0.8]
    assert sum(found.importances.values()) == pytest.approx(1.0)
    assert "best accuracy 0.8" in search_history(found).alt
    assert "Search for accuracy" in lk.report(runs, tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--search", "optuna", "--trials", "3"], "--maximize"),
        (["--search", "optuna", "--maximize", "accuracy"], "--trials"),
        (["--search", "optuna", "--trials", "0", "--maximize", "accuracy"], "--trials 0"),
        (["--search", "optuna", "--trials", "3", "--maximize", "a", "--repeats", "2"], "--repeats"),
        (["--search", "optuna", "--trials", "3", "--maximize", "a", "--minimize", "a"], "once"),
        (
            [
                "--search",
                "optuna",
                "--trials",
                "3",
                "--maximize",
                "a",
                "--minimize",
                "b",
                "--prune",
            ],
            "--prune needs one objective",
        ),
        (
            [
                *("--search", "optuna", "--trials", "1", "--maximize", "a"),
                *("--enqueue", "mode=ring", "--enqueue", "mode=tree"),
            ],
            "--enqueue gives 2 trials, more than --trials 1",
        ),
        (["--enqueue", "mode=ring"], "no effect without --search optuna"),
        (["--random", "3", "--maximize", "accuracy"], "--search optuna"),
        (["--search", "random", "--trials", "9"], "2 combinations"),
    ],
)
def test_what_cannot_be_searched_is_refused(given: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["sweep", str(NOTEBOOK), "mode=ring,tree", *given])
    assert result.exit_code == 2
    assert words in result.output
    assert not Path("runs").exists()


def test_an_axis_is_checked_at_all_its_values() -> None:
    with pytest.raises(InvalidInput, match="count"):
        sweep_plan.make_search(NOTEBOOK, {"count": (1, "many")}, search())


def test_search_random_is_random(tmp_path: Path) -> None:
    given = ["sweep", str(NOTEBOOK), "mode=ring,tree", "count=1,2,3", "--check"]
    result = CliRunner().invoke(app, [*given, "--search", "random", "--trials", "4"])
    assert (result.exit_code, result.output) == (0, "4 members\n")


STEPS = """\
import labkit as lk, time
for step in range(1, 31):
    lk.log(step=step, accuracy=(1 - x**2) * step / 30)
    time.sleep(0.03)"""


@pytest.mark.slow
def test_a_sweep_searches_prunes_and_is_done_when_resumed(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "code", "id": f"c{n}", "metadata": tags, "source": text, "outputs": []}
        | {"execution_count": None}
        for n, (text, tags) in enumerate(
            [("x: float = 0.0", {"tags": ["parameters"]}), (STEPS, {})]
        )
    ]
    whole = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    Path("search.ipynb").write_text(json.dumps(whole))
    given = ["x=uniform(-1,1)", "--search", "optuna", "--trials", "9", "--maximize", "accuracy"]
    done = CliRunner().invoke(app, ["sweep", "search.ipynb", *given, "--prune", "--jobs", "1"])
    assert done.exit_code == 0, done.output
    assert "9 of 9 completed" in done.output
    states = [run.status["state"] for run in lk.load_runs("runs")]
    assert len(states) == 9
    assert set(states) <= {"completed", "pruned"}
    again = CliRunner().invoke(app, ["sweep", "runs/search-sweep", "--resume"])
    assert "9 done" in again.output
    assert again.exit_code == 0


@pytest.mark.slow
def test_a_pruned_run_ends_on_all_ranks_after_the_same_step(cluster: lk.Cluster) -> None:
    experiment = lk.Experiment(workers=2, epochs=2000, batch_size=512, verify=False)
    live = cluster.submit(experiment)
    while not live.epochs and not live.done():
        time.sleep(0.05)
    StreamReader(live.directory / FOLDER).stop(PRUNED)
    with pytest.raises(Pruned, match="pruned after"):
        live.result()
    [run] = lk.load_runs(live.directory)
    steps = run.history.groupby("rank")["step"].max()
    assert len(steps) == 2
    assert steps[0] == steps[1]
    assert run.status["state"] == "pruned"
    assert run.status["cause"] == f"pruned after {steps[0] + 1} steps"
