"""Files that users name: what cannot be written is said before anything runs, and what is there is never lost."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from minidnn.cli import main, train
from minidnn.cli.options import Parser, drawing, output, page, writing
from minidnn.cli.planning import add_density
from tests.cli import minidnn, refuse

TRAIN = ("train", "smallnet", "--data", "digits", "--device", "host", "--batch", "128")
COMPARE = ("compare", "smallvgg", "--batch", "4", "--device", "host", "--steps", "1", "--modes", "base(m)")
SIMULATE = ("simulate", "smallvgg", "--batch", "4", "--gpu", "k40", "--modes", "base(m)")
MEMORY = ("memory", "smallvgg", "--batch", "4")


@pytest.mark.parametrize(
    "command",
    [
        (*COMPARE, "--html"), (*COMPARE, "--trace"), (*SIMULATE, "--plot"), (*MEMORY, "--save-trace"),
        (*MEMORY, "--plot"), ("plan", "smallvgg", "--gpu", "k40", "--plot"), ("profile", "smallvgg", "-o"),
        ("sweep", "smallvgg", "--gpu", "k40", "--plot"), ("sweep", "smallvgg", "--gpu", "k40", "--throughput"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("", "'' is no path"), (".", "'.' is a directory; name a file"),
        ("x" * 300, "File name too long; name another file"),
        ("/nowhere/file", "'/nowhere/file' cannot be written: there is no folder /nowhere"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_written_are_refused_before_anything_runs(
    command: tuple[str, ...], file: str, says: str
) -> None:
    assert says in refuse(*command, file)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (drawing, ("x.png", "x.PNG", "x", "/dev/full"), ("x.pdf", "x.jpg", "x.png.xyz", "x.html")),
        (page, ("x.html", "x.htm", "x", "/dev/full"), ("x.pdf", "x.png")),
    ],
)
def test_a_suffix_may_not_promise_another_format(
    kind: Callable[[str], str], good: tuple[str, ...], bad: tuple[str, ...]
) -> None:
    assert tuple(map(kind, good)) == good
    for file in bad:
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{file}' would be an? .*; name a file that ends in "):
            kind(file)


def test_a_file_without_permission_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for kind in (output, drawing, page):
        with pytest.raises(argparse.ArgumentTypeError, match="cannot be written: no permission, or a read-only file s"):
            kind(str(tmp_path / "file"))


@pytest.mark.parametrize(
    "command", [(*SIMULATE, "--html"), (*SIMULATE, "--trace"), (*MEMORY, "--save-trace"), (*MEMORY, "--plot")]
)
def test_a_full_disk_is_told_with_the_file(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "file").symlink_to("/dev/full")
    done = minidnn(*command, str(tmp_path / "file"), "--json")
    assert (done.returncode, done.stdout) == (2, "")
    said = "cannot be written: No space left on device; name another file"
    assert done.stderr == f"minidnn: {tmp_path / 'file'} {said}\n"


def test_a_refused_run_leaves_no_folders_behind(tmp_path: Path) -> None:
    assert "File name too long" in refuse(*TRAIN, "--checkpoint", f"{tmp_path}/a/b/{'c' * 300}")
    assert "cannot be written: No such file" in refuse(
        *TRAIN, "--checkpoint", f"{tmp_path}/a/b/c", "--log", f"{tmp_path}/nowhere/log"
    )
    assert "does not exist; give a directory that" in refuse(*TRAIN, "--resume", f"{tmp_path}/a/b/c")
    assert not list(tmp_path.iterdir())


def test_ctrl_c_leaves_no_half_of_a_new_file(tmp_path: Path) -> None:
    def interrupted_at(file: Path) -> None:
        with writing(str(file)) as path:
            path.write_text("half")
            raise KeyboardInterrupt

    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("old")
    for file in (old, new):
        with pytest.raises(KeyboardInterrupt):
            interrupted_at(file)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("old", "old")]


@pytest.mark.parametrize("refusing", ["access", "replace"])
def test_where_a_folder_takes_no_new_file_the_old_one_gets_the_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusing: str
) -> None:
    """A folder without permission, somebody else's file in one like /tmp, or a name on which a file is mounted."""
    file = tmp_path / "file"
    file.write_text("old")

    def replace(part: Path, final: Path) -> None:
        raise OSError(16, "Device or resource busy")

    if refusing == "access":
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    else:
        monkeypatch.setattr(Path, "replace", replace)
    with writing(str(file)) as path:
        path.write_text("new")
        assert (path.parent == tmp_path) == (refusing == "replace")
        assert file.read_text() == "old"
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "new")]


def test_a_link_counts_for_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere/file")
    with pytest.raises(argparse.ArgumentTypeError, match=r"there is no folder .*nowhere; make it"):
        output(str(tmp_path / "link"))


@pytest.mark.parametrize("line", ["--log vgg11", "--log digits", "--log 0.5"])
def test_a_name_or_a_number_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("vgg11", "digits", "0.5"):
        (tmp_path / name).write_text("an earlier run")
    parser = Parser(prog="train")
    train.add_arguments(parser)
    add_density(parser)
    parser.parse_args(["vgg11", "--data", "digits", "--density", "0.5", *line.split()])


def test_a_link_and_a_pipe_stay_what_they_are(tmp_path: Path) -> None:
    file, link, pipe = tmp_path / "file", tmp_path / "link", tmp_path / "pipe"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to("file")
    with writing(str(link)) as path:
        path.write_text("new")
        assert file.read_text() == "old"
    assert (link.is_symlink(), file.read_text(), file.stat().st_mode & 0o777) == (True, "new", 0o640)
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with writing(str(pipe)) as path:
        path.write_text("through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("simulate net.py:net --gpu h100 --trace net.py", "--trace net.py is what MODEL names"),
        ("simulate vgg11 --profile times.json --trace ./times.json", "--trace ./times.json is what --profile names"),
        ("simulate vgg11 --gpu h100 --density times.json --trace times.json", "--trace times.json is what --density"),
        ("train smallnet --weights times.json --log times.json", "--log times.json is what --weights names"),
        ("train smallnet --data times.json --log times.json", "--log times.json is what --data names"),
        ("memory --trace times.json --save-trace times.json", "--save-trace times.json is what --trace names"),
    ],
)
def test_a_file_that_is_read_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("net.py", "times.json"):
        (tmp_path / name).write_text("mine")
    assert main(command.split()) == 2
    assert said in capsys.readouterr().err
    assert [(tmp_path / name).read_text() for name in ("net.py", "times.json")] == ["mine", "mine"]
