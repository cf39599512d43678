"""Environments by id: built-in ones, and those of plug-ins that a user names."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from ..configs.errors import UnknownArgument, UserError
from ..configs.schema import EnvConfig
from .base import MessageEnv
from .types import Task

_factories: dict[str, Callable[..., MessageEnv]] = {}
_plugins: dict[str, ModuleType] = {}  # modules named in `EnvConfig.plugins`, by import name


class EnvBuildError(UserError):
    """A constructor raised; during a rollout, where the same call has worked before, a fault."""


def register(id: str, factory: Callable[..., MessageEnv]) -> None:
    """Offer ``factory`` (a class or function) under ``id``; a known id is replaced."""
    _factories[id] = factory


def registered() -> tuple[str, ...]:
    """All ids, sorted."""
    return tuple(sorted(_factories))


def make(id: str, /, **kwargs: Any) -> MessageEnv:
    """Build an environment by registered id, or by ``module:Class`` of a loaded plug-in.

    ``kwargs`` are its constructor's arguments, whatever their names.
    """
    factory = _from_plugin(id) if id not in _factories and ":" in id else _factories.get(id)
    if factory is None:
        way_out = "an id of your own needs env.plugins"
        if _plugins:
            plugins = ", ".join(sorted(_plugins))
            way_out = f"plug-in {plugins} must register it, or be named as module:Class"
        raise UserError(
            f"env.id {id!r} is not registered{_near(id, registered())}; known: "
            f"{', '.join(registered())}; {way_out}"
        )
    _check_arguments(id, factory, kwargs)
    try:
        env = factory(**kwargs)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvBuildError(
            f"env.id {id!r} cannot be built with env.kwargs {kwargs}: {_one_line(error)}"
        ) from error
    if not isinstance(env, MessageEnv):
        raise UserError(f"env.id {id!r}: its factory made a {type(env).__name__}, no MessageEnv")
    return env


def make_config(config: EnvConfig) -> MessageEnv:
    """Load the plug-ins a config names, then build its environment; for every process."""
    for plugin in config.plugins:
        load_plugin(plugin)
    return make(config.id, **config.kwargs)


def load_plugin(plugin: str) -> ModuleType:
    """Import a plug-in, a python file by path or a dotted module, at most once per process."""
    if _is_file(plugin):
        return _load_file(_absolute(plugin))
    if plugin not in _plugins:
        try:
            _plugins[plugin] = importlib.import_module(plugin)
        except (Exception, SystemExit) as error:
            raise UserError(
                f"env.plugins: cannot import module {plugin!r}: {_one_line(error)}; "
                "name an installed module or the path of a .py file"
            ) from error
    return _plugins[plugin]


def resolve_plugins(config: EnvConfig) -> EnvConfig:
    """The same config with plug-in files by absolute path, for processes in other folders."""
    plugins = tuple(str(_absolute(p)) if _is_file(p) else p for p in config.plugins)
    return dataclasses.replace(config, plugins=plugins)


def _is_file(plugin: str) -> bool:
    return plugin.endswith(".py") or os.sep in plugin


def _absolute(plugin: str) -> Path:
    """Without asking the disk, where a link may lead back to itself."""
    return Path(os.path.abspath(os.path.expanduser(plugin)))


def _load_file(path: Path) -> ModuleType:
    name = path.stem
    if not path.is_file():
        raise UserError(f"env.plugins: no such file {path}")
    if path.suffix != ".py" or not name.isidentifier():
        raise UserError(f"env.plugins: {path} is no module; name it like my_envs.py")
    module = sys.modules.get(name)
    known = module or importlib.util.find_spec(name)
    if known is not None:
        origin = getattr(known, "__file__" if isinstance(known, ModuleType) else "origin", None)
        if origin is None or os.path.realpath(origin) != os.path.realpath(path):
            raise UserError(
                f"env.plugins: {path} has the name of another module ({origin or 'built in'}); "
                "rename the file"
            )
    _plugins[name] = module or _execute(name, path)
    return _plugins[name]


def _execute(name: str, path: Path) -> ModuleType:
    """Run a file as module ``name``, which stays importable for pickling."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a script may end with sys.exit()
        del sys.modules[name]
        raise UserError(f"env.plugins: cannot import {path}: {_one_line(error)}") from error
    return module


def _from_plugin(id: str) -> type[MessageEnv]:
    """The class of a ``module:Class`` id; nothing outside the loaded plug-ins is looked at."""
    module_name, _, class_name = id.partition(":")
    module = _plugins.get(module_name)
    if module is None:
        raise UserError(
            f"env.id {id!r}: No module named {module_name!r} among env.plugins "
            f"{sorted(_plugins)}{_near(module_name, tuple(_plugins))}; add its file or module there"
        )
    found = getattr(module, class_name, None)
    if found is None:
        own = vars(module).items()
        classes = tuple(n for n, c in own if _is_env_class(c) and c.__module__ == module.__name__)
        raise UserError(
            f"env.id {id!r}: module {module_name!r} has no attribute {class_name!r}"
            f"{_near(class_name, classes)}; its environments: {', '.join(classes) or 'none'}"
        )
    if not _is_env_class(found):
        raise UserError(f"env.id {id!r}: {class_name} is no MessageEnv class")
    return found


def _is_env_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, MessageEnv)


def _check_arguments(id: str, factory: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse unknown or missing constructor arguments by name, before anything is called."""
    signature = inspect.signature(factory)
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        unknown = [key for key in kwargs if key not in signature.parameters]
        if not unknown:
            raise UserError(f"env.kwargs of {id!r}: {error}") from error
        raise UnknownArgument(
            f"env.kwargs of {id!r}: unknown argument {unknown[0]!r}"
            f"{_near(unknown[0], tuple(signature.parameters))}; it takes "
            f"{', '.join(signature.parameters) or 'none'}",
            unknown[0],
        ) from error


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _near(word: str, known: tuple[str, ...]) -> str:
    match = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


def tasks(
    env_id: str, split: Literal["train", "heldout"], start: int, count: int, seed: int
) -> list[Task]:
    """Tasks ``start .. start + count`` of a split; the same arguments give the same tasks.

    Seeds of the two splits never meet, whatever the run's seed: train ones are even, held-out
    ones odd.
    """
    if split not in ("train", "heldout"):
        raise UserError(f"split must be train or heldout, got {split!r}")
    made = []
    for index in range(start, start + count):
        text = f"{env_id}/{split}/{seed}/{index}"
        drawn = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2
        made.append(Task(f"{env_id}/{split}/{index}", 2 * drawn + (split == "heldout")))
    return made
