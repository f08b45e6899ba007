"""Finds policies by name: the built-in ones and those of installed third parties.

A third party offers a policy through the entry-point group ``moeless.policies``; the entry's
name is the kind, a dot, and the policy's name::

    [project.entry-points."moeless.policies"]
    "planner.mine" = "my_package.planner:MyPlanner"

This module must not know any policy: nothing is imported before it is asked for.
"""

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar, cast

from moeless.errors import ConfigError

ENTRY_POINT_GROUP = "moeless.policies"

PolicyT = TypeVar("PolicyT")


class Registry(Generic[PolicyT]):
    """The policies of one kind, by name.

    Args:
        kind: What they are, for entry points and messages, for example ``planner``.
        builtin: Name to ``module:Class``.
    """

    def __init__(self, kind: str, builtin: Mapping[str, str]) -> None:
        self._kind = kind
        self._builtin = dict(builtin)

    @property
    def kind(self) -> str:
        """What the policies are."""
        return self._kind

    def names(self) -> tuple[str, ...]:
        """All names that ``create`` knows, sorted."""
        return tuple(sorted({*self._builtin, *self._contributed()}))

    def create(self, name: str, /, **options: object) -> PolicyT:
        """Make a policy.

        Args:
            name: One of ``names()``.
            options: Keyword arguments of its class.

        Raises:
            ConfigError: The name or an option is unknown, a third party's policy cannot be
                imported, or its name is taken.
        """
        factory = self._factory(name)
        signature = inspect.signature(factory)
        try:
            signature.bind(**options)
        except TypeError as error:
            known = ", ".join(signature.parameters) or "none"
            raise ConfigError(
                f"{self._kind} {name!r}: {error}; its options are: {known}"
            ) from error
        return factory(**options)

    def _factory(self, name: str) -> Callable[..., PolicyT]:
        entry = self._contributed().get(name)
        target = self._builtin.get(name)
        if target is not None and entry is not None:
            raise ConfigError(
                f"{self._kind} {name!r} is built in, but {entry.value!r} claims the name too; "
                f"rename or uninstall that package's entry point"
            )
        if target is not None:
            module, _, attribute = target.partition(":")
            return cast("Callable[..., PolicyT]", getattr(import_module(module), attribute))
        if entry is None:
            known = ", ".join(self.names())
            raise ConfigError(f"unknown {self._kind} {name!r}; known are: {known}")
        try:
            loaded: Any = entry.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"{self._kind} {name!r}: cannot import {entry.value!r} ({error}); "
                f"repair or uninstall the package that offers it"
            ) from error
        return cast("Callable[..., PolicyT]", loaded)

    def _contributed(self) -> dict[str, EntryPoint]:
        prefix = f"{self._kind}."
        found = entry_points(group=ENTRY_POINT_GROUP)
        return {e.name.removeprefix(prefix): e for e in found if e.name.startswith(prefix)}
