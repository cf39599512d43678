"""Ids, plug-ins and tasks: what is found everywhere, and what is never called."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from farhorizon.configs.errors import UserError
from farhorizon.configs.schema import EnvConfig
from farhorizon.envs import (
    check_env,
    make,
    make_config,
    register,
    registry,
    resolve_plugins,
    tasks,
)
from farhorizon.envs.echo import Echo

PLUGIN = """
from farhorizon.envs import register
from farhorizon.envs.echo import Echo

class Counter(Echo):
    def __init__(self, turns=1, label=""):
        super().__init__(turns)
        self.label = label

def build(): raise AssertionError("called")

register("my/Counter-v0", Counter)
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "my_envs.py"
    path.write_text(PLUGIN)
    yield path
    registry._plugins.pop("my_envs", None)
    registry._factories.pop("my/Counter-v0", None)
    sys.modules.pop("my_envs", None)


def test_a_constructor_that_raises_is_one_line() -> None:
    message = r"env\.id 'echo-v0' cannot be built with env\.kwargs {'turns': 'abc'}: \w+Error: .*"
    with pytest.raises(UserError, match=message) as caught:
        make("echo-v0", turns="abc")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("id", ["my/Counter-v0", "my_envs:Counter"])
def test_a_plugin_by_path_with_its_arguments(plugin: Path, id: str) -> None:
    config = EnvConfig(id=id, kwargs={"turns": 2, "label": "from config"}, plugins=(str(plugin),))
    env = make_config(config)
    assert (type(env).__name__, vars(env)["turns"], vars(env)["label"]) == (
        "Counter",
        2,
        "from config",
    )
    assert type(make_config(config)) is type(env)  # loaded once
    check_env(env)


@pytest.mark.parametrize("id", ["my/Counter-v0", "my_envs:Counter"])
def test_a_plugin_in_other_processes_and_folders(
    plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, id: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    config = resolve_plugins(EnvConfig(id=id, kwargs={"label": "x"}, plugins=("my_envs.py",)))
    assert config.plugins == (str(plugin),)
    code = (
        "from farhorizon.configs.schema import EnvConfig\nfrom farhorizon.envs import make_config\n"
        f"print(make_config({config!r}).label)"
    )
    workers = [
        subprocess.Popen([sys.executable, "-c", code], cwd=elsewhere, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    assert [worker.communicate()[0] for worker in workers] == [b"x\n", b"x\n"]


def test_a_plugin_by_module_name(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(plugin.parent))
    env = make_config(EnvConfig(id="my_envs:Counter", plugins=("my_envs",)))
    assert type(env).__name__ == "Counter"
    same = make_config(EnvConfig(id="my_envs:Counter", plugins=(str(plugin),)))
    assert type(same) is type(env)  # the path of a module that is already there


def test_a_plugin_through_a_link_is_the_same_module_again(plugin: Path, tmp_path: Path) -> None:
    link = tmp_path / "elsewhere"
    link.symlink_to(plugin.parent)
    config = EnvConfig(id="my_envs:Counter", plugins=(str(link / plugin.name),))
    assert type(make_config(config)) is type(make_config(config))


@pytest.mark.parametrize(
    ("id", "plugins", "said"),
    [
        ("my_envz:Counter", ["{file}"], "No module named 'my_envz'.*did you mean 'my_envs'"),
        ("my_envs:Countr", ["{file}"], "no attribute 'Countr'.*did you mean 'Counter'"),
        ("my_envs:build", ["{file}"], "build is no MessageEnv class"),
        ("my/Countr-v0", ["{file}"], "not registered.*did you mean 'my/Counter-v0'"),
        ("my_envs:Counter", ["{file}x.py"], "no such file .*my_envs.pyx.py"),
        ("my_envs:Counter", ["my_envz"], "cannot import module 'my_envz': ModuleNotFoundError"),
        ("my_envs:Counter", ["{folder}/broken.py"], "broken.py: ZeroDivisionError: division"),
        ("my_envs:Counter", ["{folder}/json.py"], "the name of another module"),
        ("my_envs:Counter", ["{folder}/my-envs.py"], "name it like my_envs.py"),
        ("counter-v7", ["{file}"], "known: .*; plug-in .*my_envs.* must register it, or be named"),
        ("my_envs:Counter", [], "No module named 'my_envs' among env.plugins"),
        ("archive-v1", [], "did you mean 'archive-v0'.*known: archive-v0, echo-v0"),
    ],
)
def test_a_misspelt_plugin_is_one_line(
    plugin: Path, id: str, plugins: list[str], said: str
) -> None:
    (plugin.parent / "broken.py").write_text("1 / 0")
    (plugin.parent / "json.py").write_text("")
    (plugin.parent / "my-envs.py").write_text("")
    named = tuple(p.format(file=plugin, folder=plugin.parent) for p in plugins)
    with pytest.raises(UserError) as error:
        make_config(EnvConfig(id=id, plugins=named))
    assert re.search(said, str(error.value)), str(error.value)
    assert "\n" not in str(error.value)


def test_a_plugin_that_ends_the_process_is_one_line(tmp_path: Path) -> None:
    """Scripts do, for example on a missing key; so may constructors."""
    (tmp_path / "quits_at_once.py").write_text("import sys\nsys.exit('no key')\n")
    with pytest.raises(UserError, match=r"^env\.plugins: cannot import .*: SystemExit: no key$"):
        make_config(EnvConfig(id="x", plugins=(str(tmp_path / "quits_at_once.py"),)))
    (tmp_path / "quits_later.py").write_text(
        "import sys\nfrom farhorizon.envs import MessageEnv\n"
        "class Quits(MessageEnv):\n    def __init__(self): sys.exit(3)\n"
    )
    plugin = str(tmp_path / "quits_later.py")
    with pytest.raises(UserError, match=r"cannot be built .*: SystemExit: 3$"):
        make_config(EnvConfig(id="quits_later:Quits", plugins=(plugin,)))


@pytest.mark.parametrize("id", ["os:system", "builtins:eval", "farhorizon.envs.echo:Echo", "os:"])
@pytest.mark.parametrize("plugins", [(), ("os", "builtins")])
def test_no_other_callable_is_called(tmp_path: Path, id: str, plugins: tuple[str, ...]) -> None:
    sentinel = tmp_path / "sentinel"
    with pytest.raises(UserError):
        make_config(EnvConfig(id=id, kwargs={"command": f"touch {sentinel}"}, plugins=plugins))
    assert not sentinel.exists()
    for name in plugins:
        registry._plugins.pop(name)


def test_a_module_that_is_not_named_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentinel = tmp_path / "sentinel"
    (tmp_path / "evil_module.py").write_text(f"open({str(sentinel)!r}, 'w')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=r"evil_module:Env.*env\.plugins"):
        make("evil_module:Env")
    assert not sentinel.exists()


def test_a_callable_named_in_the_arguments_is_data() -> None:
    with pytest.raises(UserError, match=r"echo-v0.*unknown argument '_target_'"):
        make("echo-v0", _target_="builtins.eval")
    with pytest.raises(UserError, match=r"unknown argument 'turn'.*did you mean 'turns'"):
        make("echo-v0", turn=1)


def test_an_argument_may_be_called_id() -> None:
    class Numbered(Echo):
        def __init__(self, id: int) -> None:
            super().__init__(turns=id)

    register("numbered-v0", Numbered)
    env = make_config(EnvConfig(id="numbered-v0", kwargs={"id": 2}))
    assert isinstance(env, Numbered) and env.turns == 2
    registry._factories.pop("numbered-v0")


def test_a_factory_must_make_an_environment() -> None:
    register("broken-v0", lambda: "text")  # type: ignore[arg-type, return-value]
    with pytest.raises(UserError, match=r"broken-v0.*made a str"):
        make("broken-v0")
    registry._factories.pop("broken-v0")
    assert isinstance(make("echo-v0", turns=2), Echo)


def test_tasks_are_deterministic_and_splits_are_disjoint() -> None:
    train = tasks("echo-v0", "train", 0, 500, 0)
    assert train[100:200] == tasks("echo-v0", "train", 100, 100, 0)
    assert (train[7].id, len({t.id for t in train})) == ("echo-v0/train/7", 500)
    seeds = [
        {t.seed for t in tasks("echo-v0", split, 0, 500, seed)}
        for split in ("train", "heldout")
        for seed in (0, 1)
    ]
    assert len(set.union(*seeds)) == 2000
    assert all(s % 2 == 0 for s in seeds[0] | seeds[1])
    assert all(0 < s < 2**63 for split in seeds for s in split)
    with pytest.raises(UserError, match="split"):
        tasks("echo-v0", "test", 0, 1, 0)  # type: ignore[arg-type]


def test_the_guide_holds_a_complete_example(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    file, usage = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    (tmp_path / "my_envs.py").write_text(file)
    done = subprocess.run([sys.executable, "-c", usage], cwd=tmp_path, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
