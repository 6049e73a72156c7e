"""``schema``: all YAML keys of ``fit`` as a JSON schema, with which editors complete and check configurations.

It is made of the parser that reads them, so it knows no more and no less than ``fit``. Files of several ``--config``
are merged, and each is checked alone: so no key is required, and one file may have the arguments of a class that
another one names.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

# Private, seen in jsonargparse 4.53, whose `get_completion_script("jsonschema")` fails at classes of classes below
# torch's Module: it calls `type.__subclasses__` unbound. Drop when it does not.
from jsonargparse._completions_jsonschema import ParserJsonschema
from typing_extensions import override

from lit_fsdp.cli.train import run_trainer
from lit_fsdp.parsing.parser import OneLineParser, find_parser, run_function

_KNOWN = ("lit_fsdp", "lightning")  # packages whose classes have their arguments listed


def run_schema(args: Sequence[str]) -> int:
    """Print the schema.

    Args:
        args: The command line, the command first.
    """
    schema = run_function(
        make_fit_schema, args[1:], command="schema", description="Print a JSON schema of all YAML keys of fit."
    )
    print(json.dumps(schema, indent=1))
    return 0


def make_fit_schema() -> dict[str, Any]:
    """Return a JSON schema of the configuration files of ``fit``.

    Save it as a file, and name that in the first line of a configuration:
    `# yaml-language-server: $schema=lit_fsdp.schema.json`.
    """
    return make_schema(find_parser(run_trainer, ["fit"]), "fit")


def make_schema(parser: OneLineParser, command: str = "") -> dict[str, Any]:
    """Return the schema of what a parser reads, or of one of its commands."""
    schema: dict[str, Any] = _Schema().generate(parser)  # type: ignore[no-untyped-call]  # it has no types
    if command:
        properties = schema["properties"][command]
        schema = {**properties, "$schema": schema["$schema"], "$defs": schema.get("$defs", {})}
    own = schema["properties"].pop("$schema", None)
    schema = _let_merge(schema)
    if own is not None:
        schema["properties"]["$schema"] = own
    return schema


class _Schema(ParserJsonschema):
    """Lists classes of ours and of Lightning; what others have is left to ``fit``."""

    @override
    def subclass_def(self, class_type: type, action: Any) -> dict[str, Any]:
        is_known = class_type.__module__.partition(".")[0] in _KNOWN
        schema = super().subclass_def(class_type, action) if is_known else {"anyOf": [{"type": "string"}]}
        other = self._describe_own() if is_known else self.unknown_class_path_schema()
        schema["anyOf"].append({**other, "description": "A class of your own."})
        return schema

    def _describe_own(self) -> dict[str, Any]:
        """Describe any class of the user's."""
        own: dict[str, Any] = self.unknown_class_path_schema()
        own["properties"]["class_path"]["pattern"] = rf"^(?!({'|'.join(_KNOWN)})\.)\w+(\.\w+)+$"
        return own

    @override
    def class_path_schema(self, class_path: str, action: Any) -> dict[str, Any]:
        """Describe one class, by the names that it is found by; classes that others have loaded are the user's own."""
        if class_path.partition(".")[0] not in _KNOWN:
            return self._describe_own()
        schema: dict[str, Any] = super().class_path_schema(class_path, action)
        name = class_path.rpartition(".")[2]
        path = rf"^({'|'.join(_KNOWN)})\.(\w+\.)*{name}$"
        schema["properties"]["class_path"] = {"anyOf": [{"enum": [class_path, name]}, {"pattern": path}]}
        return schema


def _let_merge(schema: Any) -> Any:
    """Drop what only a whole configuration has: keys that must be there; and ``$schema`` of every object."""
    if isinstance(schema, list):
        return [_let_merge(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    is_free = schema.get("properties", {}).get("init_args") == {"type": "object"}  # of a class not known
    dropped = {"$schema"} if "properties" not in schema else set() if is_free else {"required"}
    result = {key: _let_merge(value) for key, value in schema.items() if key not in dropped}
    if "$schema" in schema and isinstance(schema["$schema"], str):
        result["$schema"] = schema["$schema"]
    return result
