"""What a careless or hostile user does to the commands: one sentence, exit code 2, no traceback, nothing lost."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from minidnn import nn, optim
from minidnn.cli import main
from minidnn.graph.build import build
from minidnn.graph.graph import Target
from minidnn.models import create
from minidnn.profile.gpus import named_gpu
from minidnn.profile.model import modelled
from tests.cli import COMMAND, ROOT, json_of, minidnn, refuse, succeed

MANY = "9" * 5000
TRAIN = ("train", "smallnet", "--data", "digits", "--device", "host", "--batch", "128")
MODEL = (
    "from minidnn import nn\n"
    "def net(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), input_shape=(1, 8, 8))\n"
)


def shell(text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A line of bash in which `minidnn` is the command."""
    line = text.replace("minidnn ", " ".join(map(shlex.quote, COMMAND)) + " ")
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, errors="backslashreplace", cwd=ROOT,
        env={**os.environ, **environment},
    )  # fmt: skip


# -- numbers and paths beyond reason -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "smallnet", "--batch", MANY], "at most 2147483647"),
        (["train", "smallnet", "--seed", "9" * 21], "must be a whole number from 0 to 2^64 - 1"),
        (["train", "smallnet", "--schedule", f"{MANY}:1"], "--schedule is "),
        (["train", "smallnet", "--warmup", MANY], "--warmup: "),
        (["train", "smallnet", "--budget", "9" * 500 + ".5G"], "no size; write a number and a unit"),
        (["train", "smallnet", "--data", f"synthetic:length={MANY}"], "length is "),
        (["train", f"{MANY}.py:net"], "cannot be read: File name too long; name a file that"),
        (["summary", "smallnet", "--batch", MANY], "--batch: "),
        (["train", "smallnet", "--clip", "٣"], "--clip: '٣' must be a number above 0"),
        (["summary", "vgg:extra=٣"], "write a value like 0"),
        (["summary", "smallnet:input_shape=1x8x ٣"], "write a value like 1x8x8"),
        (["train", "smallnet", "--resume", "a" * 299], "File name too long; give a directory that"),
    ],
)
def test_values_beyond_reason_are_refused(arguments: list[str], says: str) -> None:
    assert says in refuse(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "smallnet", "--data", "a" * 9000], ["compare", "smallnet", "--modes", "b" * 9000],
        ["summary", "c" * 9000], ["train", "smallnet", "--device", MANY], ["models", "d" * 9000],
    ],
)  # fmt: skip
def test_however_long_a_value_is_the_sentence_can_be_read(arguments: list[str]) -> None:
    said = refuse(*arguments)
    assert len(said) < 700
    assert "..." in said


# -- streams -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_stop_no_training(tmp_path: Path, closed: str) -> None:
    done = shell(f"minidnn {shlex.join(TRAIN)} --steps 2 --checkpoint {tmp_path}/saved {closed}")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "saved" / "step-00000002" / "state.json").exists()


@pytest.mark.parametrize("command", ["models >&-", "--help >&-", "models --json >&-", "info <&- >&-"])
def test_a_closed_stdout_is_no_error(command: str) -> None:
    done = shell(f"minidnn {command}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_refusal_needs_no_stderr() -> None:
    assert shell("minidnn train nothing 2>&-").returncode == 2
    assert shell("minidnn train nothing 2>/dev/full").returncode == 2


@pytest.mark.parametrize("command", ["models", "models --json", "--help", "train smallnet --device host --steps 1"])
def test_a_full_disk_behind_stdout_is_one_sentence(command: str) -> None:
    done = shell(f"minidnn {command} > /dev/full")
    assert done.returncode == 2
    assert done.stderr in (
        "minidnn: standard output cannot be written: No space left on device; name a file that can take it\n",
        "minidnn: standard output: No space left on device\n",
    )


def test_a_reader_that_goes_stops_no_training(tmp_path: Path) -> None:
    command = f"minidnn {shlex.join(TRAIN)} --epochs 2 --checkpoint {tmp_path}/saved"
    done = shell(f"{command} | head -1; echo ${{PIPESTATUS[0]}}")
    assert done.stdout.endswith("\n0\n")
    assert done.stderr == ""
    assert (tmp_path / "saved" / "step-00000024").is_dir()


def test_names_that_the_terminal_cannot_show_are_escaped(tmp_path: Path) -> None:
    model = tmp_path / "netz\udcff\u00e9.py"
    model.write_text(MODEL.replace("nn.Flatten(), nn.Linear(64, 10)", "{'ä': nn.Flatten(), 'ö': nn.Linear(64, 10)}"))
    for coding in ("ascii", "utf-8", "latin-1"):
        done = shell(f"minidnn summary {shlex.quote(str(model))}:net", PYTHONIOENCODING=coding)
        assert (done.returncode, done.stderr) == (0, ""), coding
    page = tmp_path / "page.html"
    done = shell(f"minidnn simulate {shlex.quote(str(model))}:net --gpu k40 --modes base --html {page} --json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["model"] == f"{model}:net"
    assert "base" in page.read_text()


# -- model files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import sys; sys.exit(0)", "cannot be loaded: SystemExit: 0"),
        ("import sys\ndef net(): sys.exit('no')", "cannot be built: SystemExit: no"),
        ("raise ValueError('two\\nlines')", "cannot be loaded: ValueError: two lines"),
        ("class Odd(BaseException): pass\ndef net(): raise Odd('mine')", "cannot be built: Odd: mine"),
        ("class Odd(BaseException): pass\nraise Odd('mine')", "cannot be loaded: Odd: mine"),
        (MODEL.replace("64, 10", "64, 0"), ":net': out_features is 0; it must be an int of 1 or more"),
        ("net = dict", "returned dict; it must return an nn.Sequential"),
        ("net = 5", "has no function 'net'"),
        (MODEL.replace("(1, 8, 8)", "'abc'"), "input_shape is 'abc'; it must be (C, H, W)"),
        (MODEL.replace("(1, 8, 8)", "(64,)"), "input_shape is (64,); it must be (C, H, W), each 1 or more"),
        (MODEL.replace("nn.Flatten()", "nn.Layer()"), "layer 0 (Layer) does not define infer; a layer must"),
        (
            "from minidnn import nn\ndef net():\n  s = nn.Linear(64, 10)\n"
            "  for _ in range(3000): s = nn.Sequential(s)\n  return s",
            "cannot be built: RecursionError",
        ),
    ],
)  # fmt: skip
def test_a_model_file_that_misbehaves_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "model.py").write_text(text)
    assert says in refuse("train", f"{tmp_path}/model.py:net", "--device", "host", "--steps", "1")


@pytest.mark.parametrize("command", [("summary",), ("memory",), ("train", "--device", "host", "--steps", "1")])
def test_what_a_model_file_prints_does_not_mix_with_the_object(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "model.py").write_text("print('loading')\n" + MODEL.replace("return", "print('building'); return"))
    done = minidnn(command[0], f"{tmp_path}/model.py:net", *command[1:], "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["model"] == f"{tmp_path}/model.py:net"
    assert set(done.stderr.split()) == {"loading", "building"}


def test_a_model_file_may_change_the_search_path(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import sys; sys.path.insert(0, '/elsewhere')\n" + MODEL)
    succeed("summary", f"{tmp_path}/model.py:net")


# -- profiles ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def profile() -> dict[str, object]:
    """A profile of smallvgg at batch 8, as JSON has it."""
    graph = build(
        create("smallvgg"), nn.CrossEntropyLoss(), (8, 1, 8, 8), Target(), optimizer=optim.SGD(0.01, momentum=0.9)
    )
    with tempfile.TemporaryDirectory() as folder:
        modelled(graph, named_gpu("k40")).save(Path(folder) / "profile.json")
        found = json.loads((Path(folder) / "profile.json").read_text())
    assert isinstance(found, dict)
    return found


def test_a_profile_of_another_network_is_refused(tmp_path: Path, profile: dict[str, object]) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(profile))
    source = ("--profile", str(file))
    assert json_of("memory", "smallvgg", "--batch", "8", *source, "--mode", "vdnn:all(p)")["pool_bytes"] > 0
    for command in ("memory", "simulate"):
        for other in ("--batch 9", "--batch 8 --precision bf16", "--batch 8 --target native"):
            said = refuse(command, "smallvgg", *other.split(), *source)
            assert f"profile {file} does not know features." in said


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ms", "x"), ("ms", -1), ("ms", float("nan")), ("ms", float("inf")), ("workspace", -512), ("workspace", 1.5),
        ("workspace", "x"), ("workspace", 2**70), ("workspace", True), ("name", None),
    ],
)  # fmt: skip
def test_a_profile_with_wrong_numbers_is_refused(
    tmp_path: Path, profile: dict[str, dict[str, list[dict[str, object]]]], field: str, value: object
) -> None:
    entries = {key: [{**way, field: value} for way in ways] for key, ways in profile["entries"].items()}
    if field == "name":
        entries = {key: [] for key in entries}
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({**profile, "entries": entries}))
    said = refuse("memory", "smallvgg", "--batch", "8", "--profile", str(file), "--mode", "vdnn:all(p)")
    assert said == f"profile {file} is damaged or no profile; give a file that 'minidnn profile' wrote"


@pytest.mark.parametrize(
    "change",
    [
        {"link": {"d2h": 0, "h2d": 1}}, {"link": {"d2h": 1e308, "h2d": 1e308}}, {"link": {"d2h": 1e9, "h2d": 1e-320}},
        {"link": {"d2h": 1, "h2d": "x"}}, {"link": {"d2h": -1, "h2d": -1}},
        {"launch_ms": -1}, {"launch_ms": float("nan")}, {"action_ms": -1}, {"wake_ms": -1}, {"wake_ms": "soon"},
        {"scratch_bytes": -512}, {"scratch_bytes": 1e30},
        {"target": {"name": "fast"}}, {"entries": [1]},
    ],
)  # fmt: skip
def test_a_profile_with_a_wrong_link_or_target_is_refused(
    tmp_path: Path, profile: dict[str, object], change: dict[str, object]
) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({**profile, **change}))
    assert "is damaged or no profile" in refuse(
        "simulate", "smallvgg", "--batch", "8", "--profile", str(file), "--modes", "vdnn:all(p)"
    )


@pytest.mark.parametrize("option", ["--profile", "--density"])
def test_json_that_is_nested_without_end_is_refused(tmp_path: Path, option: str) -> None:
    (tmp_path / "deep").write_text("[" * 100_000)
    more = () if option == "--profile" else ("--gpu", "k40")
    said = refuse("simulate", "smallvgg", *more, option, str(tmp_path / "deep"), "--quiet")
    assert "deep is not a JSON object" in said or "deep is damaged or no profile" in said


# -- Ctrl-C and several runs ---------------------------------------------------------------------------------------


def interrupted(folder: Path, signals: int, seconds: float) -> tuple[int, str]:
    """Exit code and stderr of a training that saves all the time and gets so many interrupts."""
    with subprocess.Popen(
        [*COMMAND, *TRAIN, "--epochs", "60", "--checkpoint", str(folder), "--checkpoint-every", "1"],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        while not list(folder.glob("step-*")):
            time.sleep(0.02)
        time.sleep(seconds)
        for _ in range(signals):
            process.send_signal(signal.SIGINT)
            time.sleep(0.01)
        assert process.stderr is not None
        said = process.stderr.read()
        return process.wait(60), said


@pytest.mark.parametrize("signals", [1, 2, 4])
def test_interrupts_at_any_moment_leave_whole_checkpoints_and_no_traceback(tmp_path: Path, signals: int) -> None:
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        code, said = interrupted(folder, signals, 0.03 * attempt)
        assert "Traceback" not in said, said
        assert code == 130, said
        for saved in folder.glob("step-*"):
            assert len(list(saved.iterdir())) == 3
        assert not list(folder.glob(".step-*.partial"))


def test_an_interrupt_that_became_another_error_is_an_interrupt() -> None:
    program = """
import os, signal, sys
import minidnn.cli.summary
from minidnn.cli import entry
def importing(*arguments, **options):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        while True: pass
    except KeyboardInterrupt:
        raise RuntimeError('numpy could not be imported')
minidnn.cli.summary.create = importing
sys.argv = ['minidnn', 'summary', 'smallnet']
sys.exit(entry())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "minidnn: interrupted\n")


def test_two_trainings_do_not_share_a_directory(tmp_path: Path) -> None:
    command = [*COMMAND, *TRAIN, "--epochs", "200", "--checkpoint", str(tmp_path / "saved"), "--quiet"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as first:
        while not list((tmp_path / "saved").glob("step-*")):
            time.sleep(0.02)
        said = refuse(*TRAIN, "--epochs", "1", "--checkpoint", str(tmp_path / "saved"), "--quiet")
        first.send_signal(signal.SIGINT)
        assert first.wait(60) == 130
    assert "saved is in use by another run; name another, or wait for its end" in said


def test_too_little_memory_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: object, **options: object) -> None:
        raise MemoryError("Unable to allocate 3 TiB")

    monkeypatch.setattr("minidnn.cli.summary.create", full)
    assert main(["summary", "smallnet"]) == 2
    assert capsys.readouterr() == ("", "minidnn: this machine has too little memory: Unable to allocate 3 TiB\n")
