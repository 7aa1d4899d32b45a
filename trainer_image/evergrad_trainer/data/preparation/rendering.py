"""Which chat templates render another text than in the first versions, so that their rows are prepared anew.

Those left ``tools`` and ``documents`` undefined in conversations without them, where transformers gives None,
and had a ``tojson`` with fewer arguments. Templates that only ask whether there are any render the same.
"""

from typing import Final, Literal

from jinja2 import nodes

from evergrad_trainer.data.chat_template import FOR_TEMPLATES, parse_template
from evergrad_trainer.data.preparation.rows import RowFormat

RENDERING: Final = 2
"""Version of the text of conversations, part of the fingerprint of rows whose text it has changed."""
_NEW_ARGUMENTS: Final = frozenset({"separators", "sort_keys"})

Truth = Literal["false", "same", "unknown"]
"""What is known of a condition where the key is missing: it is false in both versions, it is decided alike,
or it may not be."""


def is_rendered_otherwise(form: RowFormat, *, skips_malformed: bool) -> bool:
    """Whether conversations may have become another text by ``form``, or none.

    True also for some templates that render the same: never the other way round.
    """
    if form.template is None:
        return False
    tree = parse_template(form.template)
    # Without the arguments the row was refused, and nothing was prepared unless such rows are skipped.
    uses_new_arguments = any(map(_has_new_arguments, tree.find_all(nodes.Filter)))
    if skips_malformed and uses_new_arguments:
        return True
    return any(_body_may_differ(tree.body, key) for key in FOR_TEMPLATES)


def _has_new_arguments(one: nodes.Filter) -> bool:
    """Whether ``one`` gives ``tojson`` more than ``ensure_ascii`` and ``indent``, or may."""
    arguments = one.args
    if one.name == "map":
        # It takes a filter by name, and the arguments of that one behind it.
        if not arguments and one.dyn_args is None:
            return False
        name = arguments[0] if arguments else None
        if isinstance(name, nodes.Const) and name.value != "tojson":
            return False
        arguments = arguments[1:]
    elif one.name != "tojson":
        return False
    return (
        len(arguments) > 2
        or one.dyn_args is not None
        or one.dyn_kwargs is not None
        or any(given.key in _NEW_ARGUMENTS for given in one.kwargs)
    )


def _body_may_differ(body: list[nodes.Node], key: str) -> bool:
    for statement in body:
        if _makes_it_none(statement, key):
            # Alike from here on.
            return False
        if _may_differ(statement, key):
            return True
    return False


def _may_differ(node: nodes.Node, key: str) -> bool:
    """Whether what ``node`` renders, or sets, may depend on the key being undefined or None."""
    if isinstance(node, nodes.Name):
        return node.name == key and node.ctx == "load"
    passed_over: tuple[str, ...] = ()
    if isinstance(node, nodes.If | nodes.CondExpr):
        truth = _truth_of(node.test, key)
        if truth == "unknown":
            return True
        # What stands behind a condition that is false is not reached.
        passed_over = ("test", "body", "expr1") if truth == "false" else ("test",)
    return any(_may_differ(one, key) for one in node.iter_child_nodes(exclude=passed_over))


def _truth_of(test: nodes.Node, key: str) -> Truth:
    if isinstance(test, nodes.Name) and test.name == key:
        return "false"
    if isinstance(test, nodes.Not):
        return "unknown" if _truth_of(test.node, key) == "unknown" else "same"
    if isinstance(test, nodes.And | nodes.Or):
        left, right = _truth_of(test.left, key), _truth_of(test.right, key)
        if isinstance(test, nodes.And):
            # `tools is defined and tools`, or with `tools is not none`: one that is undefined fails at the
            # first, None at the second.
            is_not_none = isinstance(test.right, nodes.Not) and _is_test_of(
                test.right.node, key, "none"
            )
            fails = right == "false" or is_not_none
            if left == "false" or (fails and _is_test_of(test.left, key, "defined")):
                return "false"
        if "unknown" in (left, right):
            return "unknown"
        if isinstance(test, nodes.And):
            return right
        return "false" if left == right == "false" else "same"
    return "unknown" if _may_differ(test, key) else "same"


def _makes_it_none(node: nodes.Node, key: str) -> bool:
    """Whether ``node`` is `{% if not tools is defined %}{% set tools = none %}{% endif %}`, as templates of
    many models have it."""
    if not isinstance(node, nodes.If) or node.elif_ or node.else_:
        return False
    test = node.test
    is_undefined = _is_test_of(test, key, "undefined") or (
        isinstance(test, nodes.Not) and _is_test_of(test.node, key, "defined")
    )
    return is_undefined and node.body == [
        nodes.Assign(nodes.Name(key, "store"), nodes.Const(None))
    ]


def _is_test_of(node: nodes.Node, key: str, name: str) -> bool:
    return (
        isinstance(node, nodes.Test)
        and node.name == name
        and isinstance(node.node, nodes.Name)
        and node.node.name == key
    )
