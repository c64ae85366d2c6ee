"""Code outside the package, which a configuration names "file.py:Name" or "package.module:Name"."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from silodp._lazy import Registry
from silodp.errors import SilodpError, lookup
from silodp.settings import Settings, check_is_dataclass
from silodp.text import describe_exception, first_line, suggest_name

T = TypeVar("T")

_DEFINED = {
    "task.model": "function",
    "task.loss": "loss",
    "task.metrics": "metric",
    "data.source": "data set",
}
"""Setting -> what its reference names; all other references name a class."""

_REFUSAL: ContextVar[tuple[str, Collection[str]]] = ContextVar("refusal", default=("", ()))
"""Why code outside the package is not run here ("" where it is), and the references that are run all the same."""


@contextmanager
def refuse_plugins(
    reason: str = "a report runs no code outside silodp", *, but: Collection[str] = ()
) -> Iterator[None]:
    """Refuse every reference to code outside the package, also as a decorator: `@refuse_plugins()`.

    A report is made of files that may come from elsewhere, so it must not run what they refer to; nor may a party of a
    consortium run what its operator was not shown. All references are imported by `import_reference`, so no field of a
    configuration is forgotten here.

    Args:
        reason: The end of the message: why, and what to do.
        but: The references that are not refused.
    """
    # A context variable, not a global: another thread may read a configuration whose code it may run.
    token = _REFUSAL.set((reason, but))
    try:
        yield
    finally:
        _REFUSAL.reset(token)


def is_reference(name: str) -> bool:
    """Return whether a name refers to code outside the package."""
    return ":" in name


def find_reference(name: str, registry: Mapping[str, Any]) -> str | None:
    """Return the reference to a part that is not silodp's: the name itself, or that of an entry point; else None.

    Args:
        name: The name of a part, or a reference.
        registry: The parts of this kind that silodp has; one with entry points is a `Registry`.
    """
    if is_reference(name):
        return name
    return registry.find_reference(name) if isinstance(registry, Registry) else None


def split_reference(reference: str) -> tuple[str, str]:
    """Return the place of a reference, which is a module or a file that ends in ".py", and the name in it."""
    # From the right: a path of Windows has a colon after the letter of its drive.
    place, _, name = reference.removeprefix("python:").rpartition(":")
    return place, name


def find_plugin(
    name: str, registry: Mapping[str, type[T]], base: Any, where: str, also: str = "FILE.py:CLASS"
) -> type[T]:
    """Return the class of a part, such as a method or a kind of column.

    Args:
        name: A name in `registry`, a name that an installed distribution adds by an entry point, or a reference to a
            subclass of `base`.
        registry: The classes of silodp by name.
        base: The class that an outside class must be derived from.
        where: The field of the configuration, for messages.
        also: What else may be named, for the message about an unknown name.

    Raises:
        SilodpError: an unknown name, a module that cannot be imported, or an object that is no such class.
    """
    reference = find_reference(name, registry)
    if reference is None:
        return lookup(name, registry, where, also)
    found = import_reference(reference, where)
    if not (isinstance(found, type) and issubclass(found, base)):
        kind = f"{base.__module__}.{base.__name__}"
        raise _refuse(where, f" = '{name}' is no class derived from {kind}: refer to one")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
        raise _refuse(
            where, f" = '{name}' lacks {missing}, which {base.__name__} leaves to it: define them there"
        )
    if issubclass(found, Settings):
        check_is_dataclass(found)
    return found


def check_own_name(plugin: Any, registry: Mapping[str, type[Any]], where: str) -> None:
    """Check that a plug-in does not bear the name of one of the package's: ledgers and reports name it.

    Raises:
        SilodpError: it does.
    """
    if registry.get(plugin.name, type(plugin)) is not type(plugin):
        taken = f"{type(plugin).__name__}.name = '{plugin.name}'"
        raise _refuse(where, f": {taken} is taken by silodp's: give it another name")


def import_reference(reference: str, where: str) -> Any:
    """Import what a reference names.

    Args:
        reference: "package.module:name" or "path/file.py:name"; a leading "python:" is allowed.
        where: The field of the configuration, for messages.

    Raises:
        SilodpError: the module cannot be imported, or has no such name, or no such code may be run here.
    """
    reason, allowed = _REFUSAL.get()
    if reason and reference not in allowed:
        raise SilodpError(
            f"it refers to '{reference}', and {reason}", code="report.foreign_code", field=where
        )
    place, name = split_reference(reference)
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:  # a user's module may raise anything, or call sys.exit
        reason = describe_exception(error) if isinstance(error, SystemExit) else first_line(error)
        why = f"cannot be imported ({reason or type(error).__name__}): correct it"
        raise _refuse(where, f" = '{reference}': {place} {why}", "config.not_importable") from error
    if not hasattr(module, name):
        kind = _DEFINED.get(where, "class")
        defined = [known for known in vars(module) if not known.startswith("_")]
        remedy = (
            f"has no {kind} '{name}': {suggest_name(name, defined) or 'refer to one that is defined there'}"
        )
        raise _refuse(where, f" = '{reference}': {place} {remedy}", "config.not_importable")
    return getattr(module, name)


def _refuse(where: str, problem: str, code: str = "config.value") -> SilodpError:
    return SilodpError(f"{where}{problem}{'' if problem.endswith('?') else '.'}", code=code, field=where)


def locate_code(reference: str) -> tuple[str, str, bytes]:
    """Return where the code of an imported reference is: its module ("" for a file), its name, and the file's content.

    The content is b"" where a module has no file.
    """
    place, name = split_reference(reference)
    if place.endswith(".py"):
        return "", name, Path(place).read_bytes()
    file = getattr(sys.modules.get(place), "__file__", None)
    return place, name, Path(file).read_bytes() if file else b""


def read_code(place: str) -> bytes | None:
    """Return the content of a file of Python code, or of a module's file, without running it; None: no such file.

    Packages above a module are imported to find it.
    """
    if place.endswith(".py"):
        file = Path(place)
    else:
        try:
            spec = importlib.util.find_spec(place)
        except (ImportError, ValueError):
            return None
        if spec is None or not spec.has_location or spec.origin is None:
            return None
        file = Path(spec.origin)
    return file.read_bytes() if file.is_file() else None


def execute_code(content: bytes, path: str, name: str) -> Any:
    """Run the content of a file of Python code, and return what `name` is there.

    Raises:
        SilodpError: the code raised, or has no such name.
    """
    try:
        module = _run_module(content, path, identity=content)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        message = f"{path} cannot be run ({describe_exception(error)}): correct it."
        raise SilodpError(message, code="config.not_importable", field="code") from error
    if not hasattr(module, name):
        message = f"{path} has no '{name}': name the file with the code of the model."
        raise SilodpError(message, code="config.not_importable", field="code")
    return getattr(module, name)


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    status = path.stat()
    return _execute(path.resolve(), status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=64)
def _execute(path: Path, modified: int, size: int) -> Any:
    # Once for each version of a file: a class that is loaded twice would not be equal to itself.
    return _run_module(path.read_bytes(), str(path), identity=str(path).encode())


def _run_module(content: bytes, path: str, identity: bytes) -> ModuleType:
    """Run the content of a file of Python code as a module; a digest of `identity` makes its name unique."""
    module = ModuleType(f"{Path(path).stem}_{hashlib.sha256(identity).hexdigest()[:12]}")
    module.__file__ = path  # tracebacks and errors name it
    sys.modules[module.__name__] = module  # dataclasses look their own module up
    # Not imported: an import would run a compiled file beside the source, which no digest covers.
    exec(compile(content, path, "exec", dont_inherit=True), module.__dict__)
    return module
