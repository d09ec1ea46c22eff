"""Signatures as the source writes them: default values and short types, not their reprs.

States, which are named tuples, get a list of their fields with the comments beside them: shape,
dtype and which dims of the parameter they have. Public names in docstrings are links.
"""

import ast
import inspect
import re
import textwrap

from sphinx.domains.python import PythonDomain

import optax_ext
import sharding
import sharding.pipeline
import sharding.plan
import sharding.remat
import sharding.sync

_MODULES = (sharding.pipeline, sharding.plan, sharding.remat, sharding.sync, sharding, optax_ext)
# Private modules mean nothing to a reader: `_validate.Hyper` is shown as `Hyper`.
_PRIVATE = re.compile(r"\b(?:_\w+\.)+(?=\w)")


def _tree(obj):
    return ast.parse(textwrap.dedent(inspect.getsource(obj))).body[0]


def _text(node):
    return _PRIVATE.sub("", ast.unparse(node))


def _function(obj, drop_first):
    definition = _tree(inspect.unwrap(obj))
    arguments = definition.args
    if drop_first:
        (arguments.posonlyargs or arguments.args).pop(0)
    returns = _text(definition.returns) if definition.returns else None
    return f"({_text(arguments)})", returns


def _default(value):
    """The default value of a dataclass field, which may be inside ``dataclasses.field(...)``."""
    options = {option.arg: option.value for option in getattr(value, "keywords", ())}
    return options.get("default", value)


def _fields(cls):
    """The annotated fields of a class and of its bases, as arguments."""
    found = {}
    for base in reversed(cls.__mro__[:-1]):
        if "__annotations__" in vars(base):
            for item in _tree(base).body:
                if isinstance(item, ast.AnnAssign):
                    default = f" = {_text(_default(item.value))}" if item.value else ""
                    found[item.target.id] = f"{_text(item.annotation)}{default}"
    # ``_: dataclasses.KW_ONLY`` is the star of a signature.
    shown = ("*" if name == "_" else f"{name}: {text}" for name, text in found.items())
    return f"({', '.join(shown)})"


def _has_source(function):
    """False for what ``dataclasses`` has generated."""
    return function.__code__.co_filename != "<string>"


def _is_named_tuple(obj):
    return isinstance(obj, type) and issubclass(obj, tuple) and hasattr(obj, "_fields")


def process_signature(app, what, name, obj, options, signature, returns):
    """Reads a signature from the source, where there is one."""
    if what in ("function", "method"):
        return _function(obj, drop_first=what == "method")
    if what == "class" and _is_named_tuple(obj):
        return "", None
    if what == "class" and inspect.isfunction(obj.__init__) and _has_source(obj.__init__):
        return _function(obj.__init__, drop_first=True)[0], None
    if what == "class" and hasattr(obj, "__dataclass_fields__"):
        return _fields(obj), None
    return None


def _link(text, name):
    """A public name in the docstring of ``name``, as a link; of its own module first."""
    if method := re.fullmatch(r"``([Zz]ero\.(\w+))``", text):
        known = hasattr(sharding.Zero, method[2])
        return f":py:obj:`{method[1]} <sharding.Zero.{method[2]}>`" if known else text
    for module in _MODULES:
        full = f"{module.__name__}.{text.strip('`')}"
        seen = name.startswith(f"{module.__name__}.") or module in _MODULES[-2:]
        if seen and callable(getattr(module, text.strip("`"), None)):
            return text if f"{name}.".startswith(f"{full}.") else f":py:obj:`~{full}`"
    return text


def process_docstring(app, what, name, obj, options, lines):
    """Links names; adds the commented fields of a named tuple."""
    lines[:] = [re.sub(r"``[\w.]+``", lambda found: _link(found[0], name), x) for x in lines]
    if what != "class" or not _is_named_tuple(obj):
        return
    found = re.findall(r"^    (\w+): ([^#\n]+?)(?:  #(?! type)(.*?))?$", _uncommented(obj), re.M)
    if found:
        lines += ["", "Fields:", ""]
    for field, annotation, comment in found:
        comment = comment.replace("|", r"\|").replace("*", r"\*")
        lines.append(f"- **{field}** (``{annotation.strip()}``){':' * bool(comment)}{comment}")
    lines.append("")


def _uncommented(cls):
    """The source of a class without comments for the type checker."""
    return re.sub(r"  # type: ignore\S*", "", inspect.getsource(cls))


def setup(app):
    """Connects both; attributes of dataclasses are called attributes, not variables."""
    for field in PythonDomain.directives["class"].doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"
    app.connect("autodoc-process-signature", process_signature)
    app.connect("autodoc-process-docstring", process_docstring)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
