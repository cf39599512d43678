"""Configs: typed, one clear line per mistake, nothing executed while reading."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from farhorizon.configs.errors import UserError
from farhorizon.configs.load import (
    PRESETS,
    check_overrides,
    dump_config,
    load_config,
    override_config,
    parse_config,
)
from farhorizon.configs.schema import (
    EnvConfig,
    EvalConfig,
    LearnerConfig,
    SftConfig,
    Stage,
    StageConfig,
    TrainConfig,
)

BASE = ["policy=ckpt", "context=64", "env.id=echo-v0"]


def write(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text("policy: ckpt\ncontext: 64\nenv: {id: echo-v0}\n" + text)
    return str(path)


@pytest.mark.parametrize("text", ["1e-6", "'1e-6'", "1.0e-6", '"1e-6"', "0.000001"])
def test_learning_rate_is_the_float_however_it_is_written(tmp_path: Path, text: str) -> None:
    """C19."""
    in_file = load_config(TrainConfig, write(tmp_path, f"learner: {{lr: {text}}}\n"), [])
    on_line = load_config(TrainConfig, None, [*BASE, f"learner.lr={text}"])
    for config in (in_file, on_line):
        assert type(config.learner.lr) is float
        assert config.learner.lr == 1e-6


def test_text_for_a_number_names_key_and_file(tmp_path: Path) -> None:
    source = write(tmp_path, "learner: {lr: fast}\n")
    with pytest.raises(UserError) as caught:
        load_config(TrainConfig, source, [])
    assert "learner.lr" in str(caught.value)
    assert source in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["off", "no", "false", "0"])
def test_enumerated_setting_never_becomes_false(text: str) -> None:
    """C19."""
    with pytest.raises(UserError, match=r"algorithm\.scale .*one of std, none"):
        load_config(TrainConfig, None, [*BASE, f"algorithm.scale={text}"])


@pytest.mark.parametrize(
    ("text", "read", "kind"),
    [
        ("off", "False", "true or false"),
        ("2026_11_29", "20261129", "a number"),
        ("0x1F", "31", "a number"),
        ("2.50", "2.5", "a number"),
        ("1e5", "100000.0", "a number"),
    ],
)
@pytest.mark.parametrize("key", ["output", "env.id", "ray_address"])
def test_text_settings_refuse_what_yaml_reads_otherwise(
    tmp_path: Path, key: str, text: str, read: str, kind: str
) -> None:
    """C19: the run would go to another folder than the one named."""
    with pytest.raises(UserError) as caught:
        load_config(TrainConfig, None, [*BASE, f"{key}={text}"])
    assert str(caught.value) == (
        f"{key} on the command line: {read} is {kind}, not text; "
        f"""quote it, in a shell as {key}="'...'\""""
    )
    quoted = load_config(TrainConfig, None, [*BASE, f"{key}='{text}'"])
    assert {quoted.output, quoted.env.id, quoted.ray_address} >= {text}
    path = tmp_path / "stored.yaml"
    path.write_text(dump_config(quoted))
    assert load_config(TrainConfig, str(path), []) == quoted


def test_text_in_files_and_lists_is_quoted_too(tmp_path: Path) -> None:
    source = write(tmp_path, "output: 17\n")
    with pytest.raises(UserError) as caught:
        load_config(TrainConfig, source, [])
    assert str(caught.value) == f"output in {source}: 17 is a number, not text; quote it"
    with pytest.raises(UserError, match=r"env\.plugins on the command line: 12 is a number"):
        load_config(TrainConfig, None, [*BASE, "env.plugins=[a.py, 12]"])
    plain = ["output=2026-11-29", "policy=1b", "env.kwargs.pages=7"]
    config = load_config(TrainConfig, None, [*BASE, *plain])
    assert (config.output, config.policy) == ("2026-11-29", "1b")
    assert config.env.kwargs == {"pages": 7}


@pytest.mark.parametrize(
    ("key", "text", "read"),
    [
        ("steps", "010", "8"),
        ("seed", "-010", "-8"),
        ("steps", "1:30", "90"),  # base 60
        ("learner.lr", "1:30.5", "90.5"),
        ("output", "007", "7"),
        ("env.kwargs", "{turns: 012}", "10"),
    ],
)
def test_numbers_that_yaml_reads_as_others_are_refused(
    tmp_path: Path, key: str, text: str, read: str
) -> None:
    odd = text.strip("{}").removeprefix("turns: ")
    with pytest.raises(UserError) as caught:
        load_config(TrainConfig, None, [*BASE, f"{key}={text}"])
    assert str(caught.value) == (
        f"{odd} for {key} on the command line, line 1: YAML reads it as {read}; write {read}, or "
        f"quote it, in a shell as \"'{odd}'\""
    )
    source = write(tmp_path, f"steps: 2\nrollout: {{actors: {odd}}}\n")
    with pytest.raises(UserError) as caught:
        load_config(TrainConfig, source, [])
    assert str(caught.value).endswith(f": YAML reads it as {read}; write {read}, or quote it")


@pytest.mark.parametrize("text", ["0:30", "09:30", "08:00", "09:30:00", "010", "1:30", "~", "a #b"])
def test_every_text_survives_the_file_it_is_written_to(text: str) -> None:
    config = load_config(TrainConfig, None, BASE)
    config = replace(config, env=replace(config.env, kwargs={"start": text}))
    assert parse_config(TrainConfig, dump_config(config), "in run.json") == config


@pytest.mark.parametrize("text", ["10", "0", "1_000", "0x10", "'010'"])
def test_numbers_that_are_what_they_look_like_are_taken(text: str) -> None:
    steps = load_config(TrainConfig, None, [*BASE, f"steps={text}"]).steps
    assert steps == {"10": 10, "0": 0, "1_000": 1000, "0x10": 16, "'010'": 10}[text]


@pytest.mark.parametrize("text", ["a #b", "#x", "[a] # b"])
def test_a_comment_on_the_command_line_is_refused(text: str) -> None:
    comment = text[text.index("#") :]
    with pytest.raises(UserError) as caught:
        load_config(TrainConfig, None, [*BASE, f"output={text}"])
    assert str(caught.value) == (
        f"output on the command line: YAML takes {comment!r} for a comment; quote it, in a shell "
        "as output=\"'...'\""
    )
    assert load_config(TrainConfig, None, [*BASE, "output='a #b'"]).output == "a #b"


@pytest.mark.parametrize("text", ["2", "0", "1.0"])
def test_a_number_is_no_switch(text: str) -> None:
    message = rf"^allow_longer_context on the command line: {text} is not true or false$"
    with pytest.raises(UserError, match=message):
        load_config(TrainConfig, None, [*BASE, f"allow_longer_context={text}"])


def test_the_home_folder_of_paths_is_put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/red")
    config = load_config(TrainConfig, None, [*BASE, "output=~/x", "policy=~/y"])
    assert (config.output, config.policy) == ("/home/red/x", "/home/red/y")
    assert load_config(EvalConfig, None, []).output is None


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("learner.grad_clp", "learner.grad_clip"),
        ("algorithm.dual_clp", "algorithm.dual_clip"),
        ("algorithm.distil", "algorithm.distill"),
        ("lerner.lr", "learner"),
        ("env.idd", "env.id"),
    ],
)
def test_misspelt_key_is_named_with_its_neighbour(tmp_path: Path, key: str, near: str) -> None:
    """C20, in a file and on the command line."""
    section, name = key.split(".")
    text = f"{section}: {{{name}: 1}}\n" if section != "env" else ""
    with pytest.raises(UserError) as caught:
        load_config(TrainConfig, None, [*BASE, f"{key}=1"])
    shown = key if section != "lerner" else "lerner"
    assert f"unknown key {shown} on the command line; did you mean {near}?" == str(caught.value)
    if text:
        source = write(tmp_path, text)
        with pytest.raises(UserError) as caught:
            load_config(TrainConfig, source, [])
        assert f"unknown key {shown} in {source}; did you mean {near}?" == str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps=1.5", "steps on the command line: 1.5 is not a whole number"),
        ("steps=true", "steps on the command line: True is not a whole number"),
        ("learner.zero_stage=7", r"7 is not one of 0, 1, 2, 3"),
        ("learner.betas=[0.9]", r"learner\.betas .*\[0\.9\] is not a list of 2 numbers"),
        ("learner.betas=0.9", r"learner\.betas"),
        ("learner=5", "learner on the command line: expected LearnerConfig keys, got 5"),
        ("learner=null", "learner on the command line"),
        ("steps", "override 'steps' is not of the form key=value"),
        ("=3", "is not of the form key=value"),
        ("steps.x=1", r"steps on the command line"),
        ("env.kwargs=5", r"env\.kwargs on the command line: 5 is not an object such as"),
        (
            "env.plugins=my.py",
            r"env\.plugins .*'my\.py' is not a list of texts, .*; write env\.plugins=\[my\.py\]$",
        ),
        ("env.plugins=[[my.py]]", r"env\.plugins on the command line: \['my\.py'\] is not text"),
        ("learner.lr=[1", r"invalid YAML for learner\.lr on the command line"),
    ],
)
def test_wrong_values_name_the_key(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(TrainConfig, None, [*BASE, override])


@pytest.mark.parametrize("value", ["{}", "5", "null"])
def test_stages_must_be_a_list(value: str) -> None:
    with pytest.raises(UserError, match=rf"^stages .*{value}|None is not a list of Stage objects"):
        load_config(StageConfig, "quickstart", [f"stages={value}"])


def test_a_file_that_is_nested_without_end_is_named(tmp_path: Path) -> None:
    path = tmp_path / "deep.yaml"
    path.write_text("\n".join(" " * depth + "a:" for depth in range(900)))
    with pytest.raises(UserError, match=rf"^invalid YAML in {path}: it is nested too deeply$"):
        load_config(TrainConfig, str(path), [])


def test_a_name_longer_than_any_file_has_is_no_file() -> None:
    with pytest.raises(UserError, match="no such file or train preset"):
        load_config(TrainConfig, "x" * 5000, [])


def test_missing_required_keys_are_named() -> None:
    with pytest.raises(UserError, match="context is missing"):
        load_config(TrainConfig, None, ["policy=x", "env.id=e"])
    with pytest.raises(UserError, match=r"env\.id is missing"):
        load_config(TrainConfig, None, ["policy=x", "context=8", "env.kwargs.turns=2"])


def test_stages_are_typed_and_addressed_by_index(tmp_path: Path) -> None:
    path = tmp_path / "stage.yaml"
    path.write_text(
        "policy: tiny\ntext: stdlib\n"
        "stages:\n- {context: 8, steps: 2, batch_tokens: 16, lr: '1e-3'}\n"
    )
    config = load_config(StageConfig, str(path), ["stages.0.steps=5"])
    assert config.stages == (Stage(context=8, steps=5, batch_tokens=16, lr=1e-3),)
    with pytest.raises(UserError, match=r"unknown key stages\.0\.lrr .*did you mean stages\.0\.lr"):
        load_config(StageConfig, str(path), ["stages.0.lrr=1"])
    with pytest.raises(UserError, match=r"stages\.1\.steps on the command line: 1 is no index"):
        load_config(StageConfig, str(path), ["stages.1.steps=1"])


def test_optional_section_appears_when_set() -> None:
    assert load_config(EvalConfig, None, []).env is None
    config = load_config(EvalConfig, None, ["env.id=echo-v0", "env.kwargs.turns=3"])
    assert config.env == EnvConfig(id="echo-v0", kwargs={"turns": 3})


@pytest.mark.parametrize(
    "text",
    [
        "output: !!python/object/apply:os.system ['touch {}']\n",
        "output: !!python/name:builtins.eval ''\n",
        "output: !custom x\n",
        "env: &anchor {{id: a}}\n",
    ],
)
def test_yaml_tags_are_refused(tmp_path: Path, text: str) -> None:
    """C30 (c): no tag builds an object, nothing runs."""
    sentinel = tmp_path / "sentinel"
    path = tmp_path / "run.yaml"
    path.write_text("policy: x\n" + text.format(sentinel))
    with pytest.raises(UserError, match=r"YAML (tag|anchor) in .*line 2"):
        load_config(TrainConfig, str(path), [])
    assert not sentinel.exists()


@pytest.mark.parametrize("value", ["${oc.env:HOME}", "${run:now}", "${steps}", "a-${x"])
def test_interpolations_are_refused(tmp_path: Path, value: str) -> None:
    """C30 (d), also where any value is allowed and inside keys."""
    for key, text in [
        ("output", f"output: '{value}'\n"),
        ("learner.dtype", f"learner: {{dtype: '{value}'}}\n"),
    ]:
        with pytest.raises(UserError) as caught:
            load_config(TrainConfig, write(tmp_path, text), [])
        assert key in str(caught.value) or "invalid value" in str(caught.value)
    with pytest.raises(UserError):
        load_config(TrainConfig, None, [*BASE, f"env.kwargs.text={value}"])
    with pytest.raises(UserError):
        load_config(TrainConfig, None, [*BASE, f"env.kwargs={{'{value}': 1}}"])


def test_tag_on_the_command_line_is_refused() -> None:
    with pytest.raises(UserError, match="YAML tag for output on the command line"):
        load_config(TrainConfig, None, [*BASE, "output=!!python/name:os.system x"])


def test_dump_reloads_to_an_equal_config(tmp_path: Path) -> None:
    config = load_config(TrainConfig, None, BASE)
    kwargs = {"text": "1e-6", "flag": "off", "n": 3, "lr": 1e-6, "deep": {"list": [1, "no", None]}}
    config = replace(
        config,
        env=EnvConfig(id="a:B", kwargs=kwargs, plugins=("p.py",)),
        learner=LearnerConfig(lr=3e-7, betas=(0.5, 0.6)),
    )
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    assert load_config(TrainConfig, str(path), []) == config


def test_overriding_a_built_config() -> None:
    config = load_config(TrainConfig, None, BASE)
    changed = override_config(config, ["learner.betas=[0.5, 0.6]", "env.kwargs.turns=2"])
    assert changed == replace(
        config,
        learner=replace(config.learner, betas=(0.5, 0.6)),
        env=EnvConfig(id="echo-v0", kwargs={"turns": 2}),
    )
    assert config.env.kwargs == {}
    with pytest.raises(UserError, match="unknown key sed"):
        override_config(config, ["sed=1"])


def test_overrides_can_be_checked_before_the_rest_is_known() -> None:
    check_overrides(EvalConfig, ["env.plugins=[a.py]", "episodes=3"])
    with pytest.raises(UserError, match="did you mean episodes"):
        check_overrides(EvalConfig, ["episods=3"])


def test_files_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"policy: \xe4\n")
    with pytest.raises(UserError, match=rf"^config {path}: byte 8 is no UTF-8 text$"):
        load_config(TrainConfig, str(path), [])
    path.write_bytes(b"policy: a\0b\n")
    with pytest.raises(UserError, match=rf"^invalid YAML in {path}: "):
        load_config(TrainConfig, str(path), [])


@pytest.mark.skipif(not Path("/proc/self/mem").is_file(), reason="needs a file that reads as error")
def test_a_file_that_cannot_be_read_is_named() -> None:
    """Also for root, who may open every file."""
    with pytest.raises(UserError, match=r"^config /proc/self/mem: cannot be read \(.*error\)$"):
        load_config(TrainConfig, "/proc/self/mem", [])


def test_unknown_preset_suggests_one() -> None:
    with pytest.raises(UserError, match="no such file or train preset"):
        load_config(TrainConfig, "nosuch/thing", [])


def test_every_shipped_preset_loads() -> None:
    schemas = {"train": TrainConfig, "stage": StageConfig, "sft": SftConfig}
    for kind, schema in schemas.items():
        for path in (PRESETS / kind).glob("*.yaml"):
            given = [
                f"{line.split(':')[0]}=x"
                for line in path.read_text().splitlines()
                if line.endswith(": ???")
            ]
            by_name = load_config(schema, path.stem, given)
            assert by_name == load_config(schema, f"{kind}/{path.stem}", given)
            assert by_name == load_config(schema, str(path), given)
            if given:
                with pytest.raises(UserError, match=f"{given[0].split('=')[0]} is missing"):
                    load_config(schema, path.stem, [])
            assert len(path.read_text().splitlines()) <= 40


CUTS = [
    *("top_p", "top_k", "top_a", "min_p", "eta_cutoff", "repetition_penalty", "length_penalty"),
    *("allowed_token_ids", "min_tokens", "logit_bias", "ignore_eos"),
]


@pytest.mark.parametrize("name", CUTS)
def test_a_filter_of_the_distribution_is_refused_with_the_reason(name: str) -> None:
    """C05: the learner would score another distribution than the one that was sampled."""
    with pytest.raises(UserError) as caught:
        load_config(TrainConfig, None, [f"rollout.{name}=0.9"])
    assert str(caught.value) == (
        f"unknown key rollout.{name} on the command line: rollout samples from the whole "
        "distribution, which is the one that the learner scores; leave it out, or set "
        "rollout.temperature"
    )
    with pytest.raises(UserError, match=f"^unknown key algorithm.{name} "):
        load_config(TrainConfig, None, [f"algorithm.{name}=0.9"])


@pytest.mark.parametrize("name", ["stop", "stop_sequences", "stop_strings", "stop_token_ids"])
def test_stop_sequences_are_refused_with_their_own_reason(name: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(TrainConfig, None, [f"rollout.{name}=['</answer>']"])
    assert str(caught.value) == (
        f"unknown key rollout.{name} on the command line: a turn ends where the policy ends its "
        "message, which the learner scores like any token; leave it out, or set "
        "rollout.max_turn_tokens"
    )


def test_settings_of_evaluation_are_no_settings_of_training() -> None:
    """C05: greedy decoding is of `EvalConfig` alone, and a run has one temperature for both."""
    for key, value in (("greedy", "true"), ("rollout.greedy", "true"), ("eval", "{greedy: true}")):
        with pytest.raises(UserError, match=f"^unknown key {key} on the command line"):
            load_config(TrainConfig, None, [f"{key}={value}"])
