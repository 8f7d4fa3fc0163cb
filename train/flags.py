"""The command line, made from the settings: tyro prints the help and splits the words, settings.py checks the values.

    rhotrain COMMAND [FILE.toml ...] [--preset NAME ...] [flags]

Files and presets are taken out first, since they are what the help shows as defaults. tyro hands back every flag's
words as they were typed (`Words`), so a flag and a TOML key are judged by the same rules. Flags are flat (`--lr`, not
`--optim.lr`) and grouped by section in the help. Imports no torch.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import tyro

from rhotrain.train.config import Config, ConfigError
from rhotrain.train.presets import PRESETS, TINY_SUMS, preset_source
from rhotrain.train.settings import (
    SECTIONS,
    Layer,
    Source,
    from_words,
    merge,
    nearest,
    read_toml,
    resolve,
    settings,
)


class Words(list[str]):
    """What was typed after a flag; tells a given flag from a default."""


@dataclass(frozen=True, kw_only=True)
class Extra:
    """A flag that belongs to one command and is no setting. kind: bool, int, str, or a tuple of str."""

    name: str
    kind: Any
    default: Any
    help: str
    metavar: str = ""
    aliases: tuple[str, ...] = ()
    positional: bool = False


@dataclass(frozen=True, kw_only=True)
class Command:
    """fields: the settings it takes as flags, None for all; files: whether TOML files may stand in front."""

    name: str
    summary: str
    fields: tuple[str, ...] | None = None
    extras: tuple[Extra, ...] = ()
    files: bool = True

    @property
    def takes_settings(self) -> bool:
        """False for commands that only have flags of their own; they take no presets either."""
        return self.fields is None or len(self.fields) > 0


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """The layers of settings, the flags among them last, and the command's own flags."""

    sources: tuple[Source, ...]
    extras: dict[str, Any]

    @property
    def layer(self) -> Layer:
        """All layers as one."""
        return merge(source.layer for source in self.sources)

    @property
    def given(self) -> Layer:
        """The settings that were typed as flags."""
        return self.sources[-1].layer

    def config(self) -> Config:
        """The configuration. Raises ConfigError."""
        return resolve(self.sources)


FILES = Extra(
    name="files",
    kind=tuple[str, ...],
    default=(),
    help="TOML files, each over the one before; they stand in front of the flags.",
    metavar="[FILE.toml ...]",
    positional=True,
)
PRESET = Extra(
    name="preset",
    kind=tuple[str, ...],
    default=(),
    help="Named settings below files and flags, each over the one before: " + ", ".join(PRESETS) + ".",
    metavar="[NAME ...]",
)


# ------------------------------------------------------------------------------------------- files, presets, typos


def _flag(word: str) -> str | None:
    """The name of a flag word in its dashed form, None for a value. Negative numbers are values."""
    if not re.match(r"--?[a-zA-Z]", word):
        return None
    return word.lstrip("-").split("=")[0].replace("_", "-")


def _take_files(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the words in front of the first flag, the rest)."""
    first = next((i for i, word in enumerate(argv) if _flag(word) is not None), len(argv))
    for word in argv[:first]:
        if word in PRESETS:
            raise ConfigError(f"{word}: is a preset, not a TOML file; write --preset {word}")
    return list(argv[:first]), list(argv[first:])


def _take_presets(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the names after every --preset, the rest)."""
    names: list[str] = []
    rest: list[str] = []
    inside = False
    for word in argv:
        if _flag(word) is not None:
            inside = _flag(word) == "preset"
            if inside:
                names += word.split("=", 1)[1:]
            else:
                rest.append(word)
        else:
            (names if inside else rest).append(word)
    if not names and any(_flag(word) == "preset" for word in argv):
        raise ConfigError(f"preset: no name given; there is: {', '.join(PRESETS)}")
    return names, rest


def _check_flags(command: Command, argv: Sequence[str]) -> None:
    """Refuse unknown flags (with the nearest), missing values, and a list given twice (the first would be lost)."""
    kinds = _flag_kinds(command)
    seen = set()
    for i, word in enumerate(argv):
        name = _flag(word)
        if name is None or name in ("help", "h"):
            continue
        if name not in kinds:
            raise ConfigError(f"{word}: unknown flag; {_nearest_flag(name, kinds, command)}")
        count = _num_words(kinds[name])
        if count == "*" and name in seen:
            raise ConfigError(f"{word}: given twice; put all values behind one {word}")
        seen.add(name)
        if count != "*" and "=" not in word and any(_flag(w) is not None for w in _behind(argv, i, count)):
            raise ConfigError(f"{word}: it has too few values; write {word} {_metavar(kinds[name])}")


def _behind(argv: Sequence[str], index: int, count: int) -> list[str]:
    """The `count` words behind a flag; the end of the line reads as a flag."""
    return [*argv[index + 1 : index + 1 + count], *["--end"] * (index + 1 + count - len(argv))]


def _flag_kinds(command: Command) -> dict[str, Any]:
    """Type by flag name; switches are there with their `no-` form too."""
    kinds = {s.name.replace("_", "-"): s.type for s in _settings_of(command)}
    kinds |= {f"no-{name}": bool for name, kind in kinds.items() if kind is bool}
    for extra in command.extras:
        if not extra.positional:
            names = (extra.name.replace("_", "-"), *(alias.lstrip("-") for alias in extra.aliases))
            kinds |= dict.fromkeys(names, extra.kind)
    return kinds


def _nearest_flag(typed: str, known: Iterable[str], command: Command) -> str:
    setting = settings().get(typed.replace("-", "_"))
    if setting is not None:
        return f"`{setting.name}` is a setting of training that `{command.name}` does not use"
    hint = nearest(typed, [name.replace("-", "_") for name in sorted(known) if len(name) > 1])
    if not hint.startswith("did"):
        return f"see rhotrain {command.name} --help"
    return re.sub("`(.*)`", lambda match: "--" + match[1].replace("_", "-"), hint)


def _settings_of(command: Command) -> list[Any]:
    return [s for s in settings().values() if command.fields is None or s.name in command.fields]


# ------------------------------------------------------------------------------------------------------------ tyro


def _num_words(kind: Any) -> Any:
    """How many words stand behind a flag; "*" for any number."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is bool:
        return 0
    if origin is dict or (origin is tuple and args[-1] is Ellipsis):
        return "*"
    return len(args) if origin is tuple else 1


def _metavar(kind: Any) -> str:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return "{" + ",".join(args) + "}"
    if origin is dict:
        return "[KEY=VALUE ...]"
    if origin is tuple:
        name = args[0].__name__.upper()
        return f"[{name} ...]" if args[-1] is Ellipsis else " ".join(arg.__name__.upper() for arg in args)
    return str(kind.__name__.upper())


def _show(value: Any) -> list[str]:
    """A default as it would be typed."""
    if isinstance(value, dict):
        return [f"{key}={item if isinstance(item, str) else json.dumps(item)}" for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [str(item) for item in value]
    return [str(value)]


def _registry() -> tyro.constructors.ConstructorRegistry:
    """tyro's rules with ours in front: every field but a switch yields the words as typed."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def words(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
        kind: Any = info.type
        if kind not in (int, float, str) and get_origin(kind) not in (Literal, tuple, dict):
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=_num_words(kind),
            metavar=_metavar(kind),
            instance_from_str=Words,
            is_instance=lambda _: True,
            str_from_instance=_show,
        )

    return registry


def _argument(name: str, kind: Any, default: Any, help: str, *marks: Any, **options: Any) -> tuple[str, Any, Any]:
    """One field of a generated dataclass. An empty default is not shown: "(default: )" says nothing."""
    if default in ("", (), {}):
        options["help_behavior_hint"] = ""
    described = Annotated[(kind, tyro.conf.arg(help=help, **options), *marks)]  # type: ignore[misc]
    return name, described, dataclasses.field(default_factory=lambda: default)


def _extra_argument(extra: Extra) -> tuple[str, Any, Any]:
    options: dict[str, Any] = {"metavar": extra.metavar} if extra.metavar else {}
    if extra.aliases:
        options["aliases"] = extra.aliases
    marks = [tyro.conf.Positional] if extra.positional else [tyro.conf.FlagCreatePairsOff]
    return _argument(extra.name, extra.kind, extra.default, extra.help, *marks, **options)


def _arguments_type(command: Command, defaults: Layer) -> Any:
    """A dataclass for tyro: the command's own flags, and one nested dataclass for each section it uses."""
    leading = [FILES] if command.files else []
    trailing = [PRESET] if command.takes_settings else []
    members = [_extra_argument(extra) for extra in (*leading, *command.extras, *trailing)]
    for section, cls in SECTIONS.items():
        chosen = [s for s in _settings_of(command) if s.section == section]
        if not chosen:
            continue
        inner = dataclasses.make_dataclass(
            cls.__name__,
            [_argument(s.name, s.type, defaults.get(s.name, s.default), s.help) for s in chosen],
            frozen=True,
            kw_only=True,
        )
        inner.__doc__ = cls.__doc__
        members.append((section, inner, dataclasses.field(default_factory=inner)))
    return dataclasses.make_dataclass("Arguments", members, frozen=True, kw_only=True)


# ------------------------------------------------------------------------------------------------------------ parse


def _value_after(flag: str, argv: Sequence[str]) -> str:
    """The last value of a flag, before anything is parsed; empty without one."""
    value = ""
    for i, word in enumerate(argv):
        if _flag(word) == flag:
            value = word.split("=", 1)[1] if "=" in word else "".join(argv[i + 1 : i + 2])
    return value


def _below_flags(files: Sequence[str], presets: Sequence[str], argv: Sequence[str]) -> list[Source]:
    """The layers under the flags.

    A run that is resumed and names no settings takes those of its folder. When nobody names a model or a task, the
    preset tiny-sums lies at the bottom: the defaults of Config alone are not tuned for any model.
    """
    out = _value_after("out", argv)
    stored = Path(out) / "config.toml"
    if not files and not presets and out and any(_flag(word) == "resume" for word in argv) and stored.is_file():
        files = [str(stored)]
    sources = [preset_source(name) for name in presets]
    sources += [Source(layer=read_toml(path), origin=path) for path in files]
    named = any({"model", "task"} & source.layer.keys() for source in sources)
    if not named and not any(_flag(word) in ("model", "task") for word in argv):
        sources.insert(0, preset_source(TINY_SUMS.name))
    return sources


def _given(parsed: Any, command: Command, defaults: Layer) -> Layer:
    """The settings whose flags were typed, checked."""
    layer: Layer = {}
    for setting in _settings_of(command):
        value = getattr(getattr(parsed, setting.section), setting.name)
        if isinstance(value, Words):
            layer[setting.name] = from_words(setting.name, value)
        elif setting.type is bool and value != defaults.get(setting.name, setting.default):
            layer[setting.name] = value
    return layer


def _extra_value(extra: Extra, value: Any) -> Any:
    if not isinstance(value, Words):
        return value
    if get_origin(extra.kind) is tuple:
        return tuple(value)
    try:
        return extra.kind(value[0])
    except ValueError:
        raise ConfigError(f"{extra.name}: {value[0]!r} does not work; need an integer") from None


def parse(command: Command, argv: Sequence[str]) -> Parsed:
    """The command line of one command, without the command's name.

    Raises ConfigError on an unknown flag or a wrong value; SystemExit after --help, or where a value is missing.
    """
    files, rest = _take_files(argv) if command.files else ([], list(argv))
    presets, rest = _take_presets(rest) if command.takes_settings else ([], rest)
    _check_flags(command, rest)
    sources = _below_flags(files, presets, rest)
    defaults = merge(source.layer for source in sources)
    parsed = tyro.cli(
        _arguments_type(command, defaults),
        args=rest,
        prog=f"rhotrain {command.name}",
        description=command.summary,
        registry=_registry(),
        config=(tyro.conf.OmitArgPrefixes,),
    )
    if command.files and parsed.files:
        raise ConfigError(f"{parsed.files[0]}: belongs to no flag; TOML files stand in front of the flags")
    sources.append(Source(layer=_given(parsed, command, defaults)))
    extras = {extra.name: _extra_value(extra, getattr(parsed, extra.name)) for extra in command.extras}
    return Parsed(sources=tuple(sources), extras=extras)
