"""Settings come in layers: presets, then TOML files, then flags; a later layer wins. Imports no torch.

A layer is a flat dict of field name to value; field names are unique over the sections of `Config`, so `lr` means
`[optim] lr` everywhere. Every value is checked against the field's type here, whichever layer it comes from (tyro
accepts a wrong-typed default with a warning), and every mistake is a ConfigError with the field, the value and the fix.

Tables (`task_args`, `template_args`, `reward_args`) are merged key by key; the value null takes a key out. A layer that
names another `task` starts with empty `task_args`, since parameters belong to their task.
"""

import ast
import copy
import difflib
import inspect
import json
import math
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import tomli_w

from rhotrain.train import config as config_module
from rhotrain.train import update_config
from rhotrain.train.config import Config, ConfigError, wrong

Layer = dict[str, Any]

SECTIONS: dict[str, type] = {f.name: get_type_hints(Config)[f.name] for f in fields(Config)}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One field of the configuration. type: its annotation with aliases resolved; help: its docstring in the
    configuration."""

    section: str
    name: str
    type: Any
    default: Any
    help: str


@dataclass(frozen=True, kw_only=True)
class Source:
    """A layer and where it comes from; `origin` is told in messages, empty for flags."""

    layer: Layer
    origin: str = ""


def _field_docs() -> dict[tuple[str, str], str]:
    """(class, field) -> the string literal under the field, as tyro reads it."""
    docs = {}
    modules = (config_module, update_config)
    for node in [node for module in modules for node in ast.parse(inspect.getsource(module)).body]:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, text in zip(node.body, node.body[1:]):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                docs[node.name, field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return docs


@cache
def settings() -> dict[str, Setting]:
    """Every setting by field name, in the order of the sections."""
    docs = _field_docs()
    found = {}
    for section, cls in SECTIONS.items():
        hints, defaults = get_type_hints(cls), cls()
        for field in fields(cls):
            found[field.name] = Setting(
                section=section,
                name=field.name,
                type=hints[field.name],
                default=getattr(defaults, field.name),
                help=docs[cls.__name__, field.name],
            )
    return found


def nearest(word: str, options: Iterable[str]) -> str:
    """`; did you mean NAME?`, or the list of what there is."""
    known = list(options)
    close = difflib.get_close_matches(word.lower().replace("-", "_"), known, n=1, cutoff=0.6)
    if not close:
        close = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return f"did you mean `{close[0]}`?" if close else f"there is: {', '.join(known)}"


# --------------------------------------------------------------------------------------------------------- types


def _is_number(value: Any, kind: type) -> bool:
    """int and float as TOML tells them apart; a bool is neither, and a float field takes an int."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int) if kind is int else isinstance(value, int | float) and math.isfinite(value)


def _check_scalar(name: str, kind: Any, value: Any) -> Any:
    rules = {
        bool: (isinstance(value, bool), "need true or false"),
        int: (_is_number(value, int), "need an integer"),
        float: (_is_number(value, float), "need a finite number, for example 0.5 or 1e-6"),
        str: (isinstance(value, str), "need text"),
    }
    ok, rule = rules[kind]
    if not ok:
        raise wrong(name, value, rule)
    return kind(value)


def _check_table(name: str, value: Any) -> Any:
    """What JSON and TOML can both hold; null only to take a key out of an earlier layer."""
    if isinstance(value, dict):
        return {str(key): _check_table(name, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_check_table(name, item) for item in value]
    if value is not None and not isinstance(value, bool | str) and not _is_number(value, float):
        raise wrong(name, value, "tables hold text, finite numbers, true, false, lists and tables")
    return value


# A choice that is refused on purpose says why.
REFUSED_CHOICES = {
    ("kl", "k1"): "k1 is refused as a loss: its expected gradient is exactly 0, so it trains nothing; "
    "use k2, k3, k3_k2grad or k3_unbiased, or put k1 into the reward with kl_in_reward",
}


def check(name: str, value: Any) -> Any:
    """`value` in the type of the field `name` (a list becomes a tuple, an int in a float field a float).

    Raises ConfigError when it is of another type or not one of the choices.
    """
    kind = settings()[name].type
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        if value in args and isinstance(value, str):
            return value
        if isinstance(value, str) and (name, value) in REFUSED_CHOICES:
            raise wrong(name, value, REFUSED_CHOICES[name, value])
        close = difflib.get_close_matches(str(value), args, n=1)
        raise wrong(name, value, f"need one of {', '.join(args)}" + (f"; did you mean {close[0]}?" if close else ""))
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise wrong(name, value, 'need a list, for example ["a", "b"]' if args[0] is str else "need a list")
        if args[-1] is not Ellipsis and len(value) != len(args):
            raise wrong(name, value, f"need {len(args)} values")
        return tuple(_check_scalar(name, args[0], item) for item in value)
    if origin is dict:
        if not isinstance(value, dict):
            raise wrong(name, value, "need a table, as in { key = value }")
        return _check_table(name, value)
    return _check_scalar(name, kind, value)


# ---------------------------------------------------------------------------------------------------- flags' text


def _number(text: str) -> Any:
    """The text as int or float; itself when it is neither, so that `check` names the rule."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _json_value(name: str, text: str) -> Any:
    """JSON where the text is JSON, else the text itself; Python's spelling of constants is taken as meant."""
    constants = {"True": True, "False": False, "None": None}
    if text in constants:
        return constants[text]
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if text[:1] in ("{", "[", '"'):
            raise wrong(name, text, f"not valid JSON ({error})") from None
        return text


def _table(name: str, words: Sequence[str]) -> dict[str, Any]:
    """`key=value` words; a dotted key makes tables within tables, as in TOML."""
    table: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not all(key.split(".")):
            raise wrong(name, word, f"write key=value, for example --{name.replace('_', '-')} size=3")
        *parents, last = key.split(".")
        inner = table
        for parent in parents:
            inner = inner.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise wrong(name, word, f"{parent!r} already has a value, so it is no table")
        inner[last] = _json_value(name, text)
    return table


def from_words(name: str, words: Sequence[str]) -> Any:
    """The value that the command line's words stand for, checked. Raises ConfigError."""
    kind = settings()[name].type
    origin, args = get_origin(kind), get_args(kind)
    if origin is dict:
        return check(name, _table(name, words))
    numeric = kind in (int, float) or (origin is tuple and args[0] in (int, float))
    values = [_number(word) if numeric else word for word in words]
    return check(name, values if origin is tuple else values[0])


# ------------------------------------------------------------------------------------------------------------ TOML


def _section_of(section: str, table: Any) -> Layer:
    """The checked settings of one TOML table."""
    if section not in SECTIONS:
        known = settings().get(section)
        if known is not None:
            raise ConfigError(f"{section}: stands in no section; put it under [{known.section}]")
        raise ConfigError(f"[{section}]: unknown section; {nearest(section, SECTIONS)}")
    if not isinstance(table, dict):
        raise wrong(section, table, f"it is a section; write [{section}] and its keys below it")
    layer = {}
    for name, value in table.items():
        known = settings().get(name)
        if known is None:
            here = [s.name for s in settings().values() if s.section == section]
            close = difflib.get_close_matches(name, here, n=1)
            raise ConfigError(f"[{section}] {name}: unknown key; {nearest(name, here if close else settings())}")
        if known.section != section:
            raise ConfigError(f"[{section}] {name}: belongs to another section; put it under [{known.section}]")
        layer[name] = check(name, value)
    return layer


def read_toml(path: str | Path) -> Layer:
    """The layer that a TOML file holds. Raises ConfigError: no such file, bad TOML, unknown key, wrong type."""
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not valid TOML; {error}") from None
    layer: Layer = {}
    try:
        for section, table in tables.items():
            layer |= _section_of(section, table)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return layer


def layer_of(config: Config) -> Layer:
    """Every setting of a configuration."""
    return {s.name: getattr(getattr(config, s.section), s.name) for s in settings().values()}


def to_toml(config: Config) -> str:
    """The resolved configuration as TOML; `read_toml` of it gives the same configuration back."""
    tables: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, value in layer_of(config).items():
        tables[settings()[name].section][name] = list(value) if isinstance(value, tuple) else value
    return tomli_w.dumps(tables)


def write_toml(config: Config, path: str | Path) -> None:
    """Write `to_toml` to a file."""
    Path(path).write_text(to_toml(config), encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------- layers


def _merge_tables(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(below)
    for key, value in above.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict):
            inner = merged.get(key)
            merged[key] = _merge_tables(inner if isinstance(inner, dict) else {}, value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def merge(layers: Iterable[Layer]) -> Layer:
    """One layer out of several; later ones win, tables merge."""
    merged: Layer = {}
    for layer in layers:
        if "task" in layer and layer["task"] != merged.get("task", layer["task"]):
            merged.pop("task_args", None)
        for name, value in layer.items():
            merged[name] = _merge_tables(merged.get(name, {}), value) if isinstance(value, dict) else value
    return merged


def build(layer: Layer) -> Config:
    """The configuration of a layer over the defaults. Raises ConfigError on values that contradict each other."""
    sections: dict[str, Any] = {
        section: cls(**{name: value for name, value in layer.items() if settings()[name].section == section})
        for section, cls in SECTIONS.items()
    }
    return Config(**sections)


def resolve(sources: Sequence[Source]) -> Config:
    """The configuration of stacked sources; a message tells which preset or file set the value that is wrong."""
    try:
        return build(merge(source.layer for source in sources))
    except ConfigError as error:
        name = str(error).partition(":")[0]
        origins = [source.origin for source in sources if name in source.layer]
        if origins and origins[-1]:
            raise ConfigError(f"{error} (set by {origins[-1]})") from None
        raise
