"""Reader of Python source files: the members of classes and functions, without importing them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class SourceTree:
    """The packages in a folder such as site-packages. Each file is parsed once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._modules: dict[str, tuple[ast.Module, bool]] = {}

    def members_of(self, module: str, name: str) -> set[str]:
        """Return fields, methods and attributes of a class, or the parameters of a function.

        Those of base classes in the same packages count, and parameters of `__init__`. Raises
        LookupError with a few words about what there is not.
        """
        home, node = self._find(module, name)
        if not isinstance(node, ast.ClassDef):
            return set(_parameters(node))
        found = set(_own_members(node))
        for base in node.bases:
            if isinstance(base, ast.Name):
                try:
                    found |= self.members_of(home, base.id)
                except LookupError:  # of another package, or a built-in
                    continue
        return found

    def needs_of(self, module: str, name: str) -> set[str]:
        """Return what has to be given to create an object: parameters or fields without a default.

        Raises LookupError as `members_of` does.
        """
        home, node = self._find(module, name)
        if not isinstance(node, ast.ClassDef):
            return set(_needed_parameters(node))
        for part in node.body:
            if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                return set(_needed_parameters(part)) - {"self"}
        found = {field for field, has_default in _fields(node) if not has_default}
        for base in node.bases:
            if isinstance(base, ast.Name):
                try:
                    found |= self.needs_of(home, base.id)
                except LookupError:  # as above
                    continue
        return found

    def fields_of(self, module: str, name: str) -> list[str]:
        """Return the fields of a dataclass in their order, without those of its bases.

        Raises LookupError as `members_of` does.
        """
        _, node = self._find(module, name)
        assert isinstance(node, ast.ClassDef)
        return [field for field, _ in _fields(node)]

    def _find(self, module: str, name: str) -> tuple[str, Definition]:
        """Return the definition of a name and its module, through modules that only import it."""
        seen: set[tuple[str, str]] = set()
        while (module, name) not in seen:
            seen.add((module, name))
            tree, is_package = self._parse(module)
            imported = module, name
            for node in ast.walk(tree):  # definitions and imports may stand in an `if` or a `try`
                if isinstance(node, Definition) and node.name == name:
                    return module, node
                if isinstance(node, ast.ImportFrom):
                    home = _absolute_name(node, module, is_package=is_package)
                    for alias in node.names:
                        if (alias.asname or alias.name) == name:
                            imported = home, alias.name
            module, name = imported
        raise LookupError("there is no such class or function")

    def _parse(self, module: str) -> tuple[ast.Module, bool]:
        if module not in self._modules:
            path = self._root.joinpath(*module.split("."))
            package, file = path / "__init__.py", path.with_name(f"{path.name}.py")
            found = package if package.is_file() else file
            try:
                tree = ast.parse(found.read_bytes())
            except (OSError, SyntaxError, ValueError):
                raise LookupError("there is no such module") from None
            self._modules[module] = tree, found == package
        return self._modules[module]


def _absolute_name(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, *filter(None, [node.module])])


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, bool]]:
    """Yield the fields of a dataclass, and whether each has a default."""
    for part in node.body:
        match part:
            case ast.AnnAssign(target=ast.Name(name), annotation=kind, value=default):
                if "ClassVar" not in ast.unparse(kind):
                    yield name, default is not None


def _needed_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    told = node.args
    places = [*told.posonlyargs, *told.args]
    for one in places[: len(places) - len(told.defaults)]:
        yield one.arg
    for one, default in zip(told.kwonlyargs, told.kw_defaults, strict=True):
        if default is None:
            yield one.arg


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    told = node.args
    for one in (*told.posonlyargs, *told.args, *told.kwonlyargs):
        yield one.arg


def _own_members(node: ast.ClassDef) -> Iterator[str]:
    for part in node.body:
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            yield part.name
            yield from _parameters(part) if part.name == "__init__" else ()
            yield from _attributes_set(part)
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            yield part.target.id
        elif isinstance(part, ast.Assign):
            yield from (target.id for target in part.targets if isinstance(target, ast.Name))


def _attributes_set(method: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Yield the attributes that a method assigns to `self`."""
    for node in ast.walk(method):
        match node:
            case ast.Attribute(value=ast.Name("self"), attr=name, ctx=ast.Store()):
                yield name
