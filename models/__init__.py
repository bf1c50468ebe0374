"""Networks, written with the public API alone, and how a command names one.

A factory takes options by keyword, among them `num_classes` and `input_shape`, and returns a `Sequential` whose
`input_shape` (C, H, W) says what it eats.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from stat import S_ISREG
from typing import Any

from minidnn import nn
from minidnn.errors import ArgumentError, MiniDnnError
from minidnn.models.alexnet import alexnet, alexnet_tv
from minidnn.models.smallnet import smallnet, smallvgg
from minidnn.models.table3 import table3
from minidnn.models.vgg import VARIANTS, vgg, vgg101

__all__ = [
    "MODELS", "alexnet", "alexnet_tv", "create", "options", "resolve", "smallnet", "smallvgg", "table3", "vgg",
    "vgg101",
]  # fmt: skip

Factory = Callable[..., nn.Sequential]
_PACKAGE = str(Path(__file__).resolve().parents[1])
_PLAIN = re.compile(r"[-+.0-9ex]{1,30}")
"""Numbers and shapes as they are written everywhere: ASCII digits, no underscores, no blanks, finite."""

MODELS: dict[str, Factory] = {
    "smallnet": smallnet,
    "smallvgg": smallvgg,
    "alexnet": alexnet,
    "alexnet_tv": alexnet_tv,
    **VARIANTS,
    "table3": table3,
}
"""The built-in networks by name."""


def resolve(spec: str) -> Factory:
    """The factory that `spec` names, its options filled in.

    `vgg16`, `vgg:extra=20,batch_norm=true` name a built-in network, `path/to/file.py:function` (with `:option=value`
    behind, if need be) a function of one's own that returns a `Sequential`. Raises ArgumentError.
    """
    if not isinstance(spec, str):
        raise ArgumentError(
            f"model is a {type(spec).__name__}; "
            "give a name such as 'vgg16', or path/to/file.py:function"
        )
    name, _, text = spec.partition(":")
    if name.endswith(".py"):
        function, _, text = text.partition(":")
        factory = _from_file(Path(name), function)
    elif name in MODELS:
        factory = MODELS[name]
    else:
        raise ArgumentError(
            f"there is no model {name!r}; the models are {', '.join(MODELS)}, or path/to/file.py:function"
        )
    return partial(factory, **_parse_options(spec, factory, text)) if text else factory


def create(
    spec: str, num_classes: int | None = None, input_shape: tuple[int, ...] | None = None
) -> nn.Sequential:
    """The network that `spec` names, for so many classes and that input (C, H, W) where the spec leaves them open.

    A factory need not have these two options; the network's `input_shape` is set in any case. Raises ArgumentError,
    or ShapeError where the input does not suit the network.
    """
    factory = resolve(spec)
    fixed = factory.keywords if isinstance(factory, partial) else {}
    known = options(factory)
    wanted = {"num_classes": num_classes, "input_shape": input_shape}
    chosen = {
        name: value for name, value in wanted.items() if value is not None and name in known and name not in fixed
    }
    try:
        net = factory(**chosen)
    except ArgumentError as error:
        raise ArgumentError(f"model {spec!r}: {error}") from error
    except (MiniDnnError, KeyboardInterrupt):
        raise
    except BaseException as error:  # whatever a function of a user's does
        raise ArgumentError(f"model {spec!r} cannot be built: {_said(error)}") from error
    if not isinstance(net, nn.Sequential):
        raise ArgumentError(f"model {spec!r} returned {type(net).__name__}; it must return an nn.Sequential")
    if input_shape is not None and "input_shape" not in fixed:
        net.input_shape = input_shape
    return net


def _said(error: BaseException) -> str:
    """What an exception says, and the line of the user's file in which it came up."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_PACKAGE)]
    lines = [f"{Path(f.filename).name}, line {f.lineno}" for f in frames if os.path.isfile(f.filename)]
    return f"{type(error).__name__}: {error}" + (f" ({lines[-1]})" if lines else "")


def options(factory: Factory) -> dict[str, Any]:
    """The factory's options and their defaults (`inspect.Parameter.empty` where there is none)."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # some built-in functions tell nothing
        return {}
    return {
        name: parameter.default for name, parameter in parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY)
    }  # fmt: skip


def _parse_options(spec: str, factory: Factory, text: str) -> dict[str, Any]:
    known = options(factory)
    if not known:
        raise ArgumentError(f"model {spec!r} has no option {text!r}; its function takes none: leave it out")
    chosen: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if name not in known or not equals:
            raise ArgumentError(
                f"model {spec!r} has no option {part!r}; its options are "
                + ", ".join(f"{option}={_show(default)}" for option, default in known.items())
            )
        chosen[name] = _parse_value(spec, name, value, known[name])
    return chosen


def _parse_value(spec: str, name: str, text: str, default: object) -> object:
    """`text` as a value of the default's type; without a default, an int if it is one."""
    try:
        if isinstance(default, bool):
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if isinstance(default, (int, float, tuple)) and not _PLAIN.fullmatch(text):
            raise ValueError
        if isinstance(default, (int, float)):
            return type(default)(text)
        if isinstance(default, tuple):
            sizes = tuple(int(part) for part in text.split("x"))
            if len(sizes) == len(default) and min(sizes) > 0:
                return sizes
            raise ValueError
    except (KeyError, ValueError):
        raise ArgumentError(
            f"option {name} of model {spec!r} is {text!r}; write a value like {_show(default)}"
        ) from None
    return int(text) if default is inspect.Parameter.empty and re.fullmatch(r"-?[0-9]{1,18}", text) else text


def _show(value: object) -> str:
    """A value as it is written in a spec."""
    if value is inspect.Parameter.empty:
        return "..."
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_readable(path: Path) -> None:
    """Raises ArgumentError for what is there and no file, or one that cannot be opened, or is not there."""
    try:
        plain = S_ISREG(os.stat(path).st_mode)
        if plain:
            path.open("rb").close()
    except (FileNotFoundError, ValueError):  # the latter where the name has a NUL in it
        raise ArgumentError(f"model file {str(path)!r} does not exist") from None
    except OSError as error:
        raise ArgumentError(
            f"model file {str(path)!r} cannot be read: {error.strerror}; name a file that can be read"
        ) from None
    if not plain:
        raise ArgumentError(f"model file {str(path)!r} is no file; name a Python file")


def _from_file(path: Path, function: str) -> Factory:
    """`function` of the Python file at `path`, which may import its neighbours."""
    _check_readable(path)
    spec = spec_from_file_location(f"minidnn_model_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ArgumentError(f"model file {str(path)!r} is no Python file")
    module = module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look up their module by name
    neighbours = str(path.parent.resolve())
    sys.path.insert(0, neighbours)
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # as above: whatever a user's file does
        raise ArgumentError(f"model file {str(path)!r} cannot be loaded: {_said(error)}") from error
    finally:
        if neighbours in sys.path:  # the module may have changed it too
            sys.path.remove(neighbours)
    functions = [
        name for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]  # fmt: skip
    factory = getattr(module, function, None)
    if not callable(factory):
        found = ", ".join(functions) or "none"
        missing = f"has no function {function!r}" if function else "needs a function behind it, file.py:function"
        raise ArgumentError(f"model file {str(path)!r} {missing}; its functions are {found}")
    return factory  # type: ignore[no-any-return]
