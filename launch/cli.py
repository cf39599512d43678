"""``farhorizon SUBCOMMAND ...``: parse, run, and turn a user's mistake into one line."""

from __future__ import annotations

import argparse
import os
import select
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from ..configs.errors import NO_ROOM, RunFailed, UnknownArgument, UserError, last_line
from .interrupt import exit_code, heed_sigterm

FAILED, USER_MISTAKE, UNREAD = 1, 2, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done as asked, 1 failed while running, 2 a mistake in the input, 130 Ctrl-C, 143
    SIGTERM, 141 nobody reads what it prints (``... | head``)."""
    heed_sigterm()
    # TRL's trainers report their use to a public server unless huggingface_hub, which is imported
    # later, here or in a process of ours, finds this.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    arguments = _parse(argv)
    try:
        code = _COMMANDS[arguments.command](arguments)
        sys.stdout.flush()  # at exit, nobody could catch it
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return exit_code()
    except BrokenPipeError:
        if not _output_is_closed():
            raise
        return UNREAD
    except Exception as error:
        # Ray wraps what an actor raised; its own text would be the whole remote traceback.
        cause = getattr(error, "cause", None) or error
        if _process_ended(cause):
            cause = RunFailed(
                f"a process of the run ended while it worked ({last_line(cause)}); "
                "farhorizon doctor looks at this machine"
            )
        if isinstance(cause, OSError) and (cause.filename or cause.errno in NO_ROOM):
            place = cause.filename or "output"
            cause = RunFailed(f"{place}: cannot be read or written: {cause.strerror}")
        if not isinstance(cause, UserError | RunFailed):
            raise
        print(f"farhorizon: {cause}{_way_out(cause, arguments)}", file=sys.stderr)
        return USER_MISTAKE if isinstance(cause, UserError) else FAILED


def _process_ended(error: BaseException) -> bool:
    """Whether Ray says that a process or node is gone; Ray, slow to import, is loaded then."""
    ray = sys.modules.get("ray.exceptions")
    return (
        ray is not None
        and isinstance(error, ray.RayError)
        and not isinstance(error, ray.RayTaskError)
    )


def _output_is_closed() -> bool:
    """Whether stdout has no reader any more; what is left of the output is dropped then."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    closed = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    if closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return closed


def _way_out(error: Exception, arguments: argparse.Namespace) -> str:
    """Where an argument that an environment does not take comes from, if not from this line."""
    if not isinstance(error, UnknownArgument) or "config" not in arguments:
        return ""
    own = ("env.kwargs=", f"env.kwargs.{error.name}=")
    if any(text.startswith(own) for text in arguments.overrides):
        return ""
    return f"; {arguments.config} gives it to its own environment: add 'env.kwargs={{}}'"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Settings may stand before and behind options; argparse itself takes one run of them only."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    settings = all("=" in text and not text.startswith("-") for text in rest)
    if rest and not (settings and "overrides" in arguments):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides += rest
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="farhorizon",
        description="Agentic RL post-training on long-horizon tasks.",
        epilog="CONFIG is a YAML file or a preset such as quickstart; key=value overrides it.",
    )
    parser.add_argument("--version", action="version", version=version("farhorizon"))
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (
        ("stage", "train a checkpoint through context stages"),
        ("sft", "warm a checkpoint up on demonstration episodes"),
        ("train", "RL from a checkpoint; goes on where a stopped run was"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("config", metavar="CONFIG", help="YAML file or preset")
        _add_overrides(command)
    command = commands.add_parser("eval", help="success on held-out tasks, with its interval")
    command.add_argument("path", metavar="PATH", help="run folder or checkpoint folder")
    _add_overrides(command)
    command = commands.add_parser("serve", help="an OpenAI server of vLLM on a checkpoint")
    command.add_argument("path", metavar="PATH", help="run folder or checkpoint folder")
    _add_overrides(command)
    command = commands.add_parser("play", help="print one episode turn by turn")
    command.add_argument("env", metavar="ENV", help="environment id")
    command.add_argument("--policy", help="checkpoint or run folder; default: the env's expert")
    _add_overrides(command)
    command = commands.add_parser("bench", help="figures beside those of another tool")
    command.add_argument(
        "name",
        metavar="NAME",
        help="on a GPU attnres, decode, kda, logprob, moe, parity, step; on a CPU grpo, learning, "
        "overlap, routing, thresholds",
    )
    _add_overrides(command)
    command = commands.add_parser("plan", help="sizes of a policy, and what fits on given GPUs")
    command.add_argument(
        "policy", metavar="POLICY", help="policy preset, checkpoint or run folder, or config.json"
    )
    _add_overrides(command)
    commands.add_parser("doctor", help="versions, devices, Ray and disk of this machine")
    return parser


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", default=[], help="settings to change"
    )


# Each command imports what it needs only when it runs: --help stays quick.


def _stage(arguments: argparse.Namespace) -> int:
    from ..configs.load import load_config
    from ..configs.schema import StageConfig

    config = load_config(StageConfig, arguments.config, arguments.overrides)
    from .stage import run_stages

    run_stages(config)
    return 0


def _sft(arguments: argparse.Namespace) -> int:
    from ..configs.load import load_config
    from ..configs.schema import SftConfig

    config = load_config(SftConfig, arguments.config, arguments.overrides)
    from .sft import run_sft

    result = Path(config.output) / "config.json"
    before = os.path.isfile(result)  # asks without an exception whatever the name is
    try:
        run_sft(config)
    except KeyboardInterrupt:
        if result.exists() and not before:  # it was being written: now it is whole
            print(f"sft: interrupted, but done; checkpoint {config.output}")
        else:
            again = shlex.join(["farhorizon", "sft", arguments.config, *arguments.overrides])
            print(f"sft: interrupted, nothing is saved; what begins again: {again}")
        raise
    return 0


def _train(arguments: argparse.Namespace) -> int:
    from ..configs.load import load_config
    from ..configs.schema import TrainConfig

    config = load_config(TrainConfig, arguments.config, arguments.overrides)
    from .train import train

    return train(config)


def _eval(arguments: argparse.Namespace) -> int:
    from ..configs.load import check_overrides
    from ..configs.schema import EvalConfig

    check_overrides(EvalConfig, arguments.overrides)
    from .evaluate import evaluate

    return evaluate(arguments.path, arguments.overrides)


def _serve(arguments: argparse.Namespace) -> int:
    from ..configs.load import override_config
    from ..configs.schema import ServeConfig

    config = override_config(ServeConfig(), arguments.overrides)
    from .serve import serve

    return serve(arguments.path, config)


def _play(arguments: argparse.Namespace) -> int:
    from ..configs.load import load_config
    from ..configs.schema import PlayConfig

    given = [f"policy={arguments.policy}"] if arguments.policy else []
    overrides = [f"env.id={arguments.env}", *given, *arguments.overrides]
    config = load_config(PlayConfig, None, overrides)
    from .play import play

    return play(config)


def _bench(arguments: argparse.Namespace) -> int:
    from .benchmarks import run_benchmark

    return run_benchmark(arguments.name, arguments.overrides)


def _plan(arguments: argparse.Namespace) -> int:
    from ..configs.load import override_config
    from ..configs.schema import PlanConfig

    config = override_config(PlanConfig(), arguments.overrides)
    from .plan import plan

    return plan(arguments.policy, config)


def _doctor(arguments: argparse.Namespace) -> int:
    from .doctor import doctor

    return doctor()


_COMMANDS = {
    "stage": _stage,
    "sft": _sft,
    "train": _train,
    "eval": _eval,
    "serve": _serve,
    "play": _play,
    "bench": _bench,
    "plan": _plan,
    "doctor": _doctor,
}

if __name__ == "__main__":
    sys.exit(main())
