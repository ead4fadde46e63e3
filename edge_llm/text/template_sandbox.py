"""Jinja's sandbox, made safe for time and memory too: the only place that imports jinja2.

A template is parsed by Jinja, checked node by node against a list of what chat templates need, and rewritten so that
each operation that could run long or grow goes through `Library` and its budget: loops and macros count their steps,
comparisons, slices, concatenations, lists and literals become calls. Jinja then compiles and runs the rest as always.
Literals become texts of origin SCAFFOLD, so that the output knows what the template wrote (see prompt.py).
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import partial
from itertools import islice
from types import MethodType
from typing import Any, NoReturn

from jinja2 import nodes, pass_context
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.lexer import TokenStream
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import TESTS
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from edge_llm.errors import TemplateError
from edge_llm.text.prompt import SCAFFOLD, PromptText
from edge_llm.text.template_budget import MAX_CALL_DEPTH, MAX_ITEMS, Budget, refused
from edge_llm.text.template_library import Library
from edge_llm.text.template_values import Method, words

MAX_SOURCE_BYTES = 256 << 10
MAX_LEXED = 30_000
MAX_NODES = 10_000
MAX_DEPTH = 100
MAX_NAMES = 256
MAX_DATE_FORMAT = 64
MAX_REASON = 300

_LOOP_ATTRIBUTES = words("cycle depth depth0 first index index0 last length nextitem previtem revindex revindex0")
_ALLOWED_NODES: frozenset[type[nodes.Node]] = frozenset(
    getattr(nodes, name)
    for name in words(
        "Template Output TemplateData Scope If For Break Continue Macro CallBlock FilterBlock With Assign AssignBlock"
    )
    | words(
        "NSRef Name Const List Tuple Dict Pair Getattr Getitem Slice Call Keyword Filter Test CondExpr Compare Operand"
    )
    | words("And Or Not Concat Add Sub Mul Div FloorDiv Mod Pow Neg Pos")
)
_SAME_TESTS = words(
    "boolean defined false float integer iterable mapping none number sameas sequence string true undefined"
)
_COMPARING_TESTS = {
    "eq": ("eq", "==", "equalto"),
    "ne": ("ne", "!="),
    "gt": ("gt", ">", "greaterthan"),
    "gteq": ("ge", ">="),
    "lt": ("lt", "<", "lessthan"),
    "lteq": ("le", "<="),
    "in": ("in",),
}


# Jinja's pattern of numbers takes 300 bytes of stack for each digit.
_LONG_NUMBER = re.compile(r"[0-9_]{1000}")


class _Generation(Extension):
    """`{% generation %}` marks what the model said, for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class Sandbox(ImmutableSandboxedEnvironment):
    """One template, compiled once. `render` may be called by several threads; they take turns.

    `clock` gives the time that `strftime_now` shows; `reads` are the names that the template looks up. Raises
    `TemplateError` if the source is too large, broken, or uses what is not allowed.
    """

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self, source: str, clock: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, LoopControlExtension],
            optimized=False,
            cache_size=0,
        )
        if len(source.encode("utf-8", "surrogatepass")) > MAX_SOURCE_BYTES:
            raise TemplateError(f"the chat template is larger than {MAX_SOURCE_BYTES} bytes")
        if _LONG_NUMBER.search(source):
            _too_large()
        self.finalize = self._finalize
        self.library = Library(Undefined)
        self._literals: list[PromptText] = []
        self._clock = clock
        self._lock = threading.Lock()
        self._functions: dict[str, Any] = {
            "range": self._range,
            "namespace": Namespace,
            "dict": _dict,
            "raise_exception": self._raise_exception,
            "strftime_now": self._strftime_now,
        }
        self.globals = dict(self._functions)
        self._add_operations()
        try:
            tree = self.parse(source)
            self.reads = _check(tree) - self.globals.keys()
            tree = _Rewrite(self._literals).visit(tree)
            self._template = self.template_class.from_code(self, self.compile(tree), self.globals)
        except TemplateError:
            raise
        except TemplateSyntaxError as error:
            raise TemplateError(f"line {error.lineno} of the chat template: {_line(error)}") from None
        except Exception as error:  # jinja2 and Python refuse odd templates in many ways
            raise TemplateError(f"the chat template cannot be compiled: {_line(error)}") from None

    def render(self, variables: Mapping[str, Any], budget: Budget) -> PromptText:
        """The text that the template makes of `variables`. Raises `TemplateError`."""
        with self._lock:
            self.library.budget = budget
            try:
                return self.concat(self._template.root_render_func(self._template.new_context(dict(variables))))
            except TemplateError:
                raise
            except RecursionError:
                raise TemplateError("the chat template nests too deeply") from None
            except Exception as error:  # whatever a hostile template finds, it is the template's fault
                raise TemplateError(
                    f"the chat template failed: {_line(error)}",
                    hint="the template may not support this kind of conversation",
                ) from None

    def _tokenize(
        self, source: str, name: str | None, filename: str | None = None, state: str | None = None
    ) -> TokenStream:
        """As Jinja's, but it stops at MAX_LEXED."""
        tokens = islice(self.lexer.tokeniter(source, name, filename, state), MAX_LEXED + 1)
        counted = (token if count < MAX_LEXED else _too_large() for count, token in enumerate(tokens))
        return TokenStream(self.lexer.wrap(counted, name, filename), name, filename)

    def _add_operations(self) -> None:
        """What templates may name, and, under names that no template can write, what `_Rewrite` puts in."""
        library = self.library
        tests: dict[str, Any] = {name: TESTS[name] for name in _SAME_TESTS}
        tests |= {name: partial(library.compare, key) for key, names in _COMPARING_TESTS.items() for name in names}
        tests["divisibleby"] = lambda value, number: library.arithmetic("%", value, number) == 0
        tests["even"] = lambda value: library.arithmetic("%", value, 2) == 0
        tests["odd"] = lambda value: library.arithmetic("%", value, 2) == 1
        inserted: dict[str, Any] = {
            "~": library.concat,
            "[:]": library.slice,
            "[]": library.collect,
            "{}": library.scalar,
            "?": library.compare,
            "''": self._literals.__getitem__,
            "++": self._tick,
        }
        self.tests = library.tests = tests
        self.filters = library.filters | inserted

    def handle_exception(self, source: str | None = None) -> NoReturn:
        """Jinja would rewrite the traceback here, which costs time and shows nothing that we keep."""
        error = sys.exc_info()[1]
        raise error if error else RuntimeError("no exception to handle")

    # -- what compiled code calls

    def concat(self, texts: Iterable[str]) -> PromptText:
        return self.library.concat_texts(list(texts))

    @pass_context
    def _finalize(self, _context: Context, value: Any) -> str:
        """The text of a printed value. (Asking for the context keeps Jinja from evaluating it while compiling.)"""
        return self.library.string(value)

    def _tick(self, cost: int) -> bool:
        self.library.budget.step(cost)
        return True

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        return self.library.arithmetic(operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, Undefined):
            obj._fail_with_undefined_error()
        if isinstance(obj, LoopContext):
            if attribute not in _LOOP_ATTRIBUTES:
                raise refused(f"loop.{attribute}")
            return getattr(obj, attribute)
        if isinstance(obj, Namespace):
            missing = self.undefined(obj=obj, name=attribute)
            return missing if attribute.startswith("_") else getattr(obj, attribute, missing)
        return self.library.attribute(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(obj, LoopContext | Namespace | Undefined):
            return self.getattr(obj, str(argument))
        return self.library.item(obj, argument)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = self.library.budget
        budget.step(4)
        if isinstance(obj, Macro | LoopContext):
            if budget.depth >= MAX_CALL_DEPTH:
                raise TemplateError("the chat template nests too many calls")
            budget.depth += 1
            try:
                return context.call(obj, *args, **kwargs)
            finally:
                budget.depth -= 1
        kwargs.pop("_loop_vars", None)
        kwargs.pop("_block_vars", None)
        if isinstance(obj, Method):
            return self.library.invoke(obj, args, kwargs)
        if isinstance(obj, MethodType) and obj.__func__ is LoopContext.cycle:
            return obj(*args)
        if any(obj is function for function in self._functions.values()):
            budget.measure((args, kwargs))
            budget.items(len(kwargs))
            return obj(*args, **kwargs)
        if isinstance(obj, Undefined):
            obj._fail_with_undefined_error()
        raise refused(f"a call of a {type(obj).__name__}")

    def _range(self, *bounds: int) -> range:
        made = range(*bounds)
        if len(made) > MAX_ITEMS:
            raise refused(f"a range of more than {MAX_ITEMS}")
        return made

    def _raise_exception(self, reason: Any = "") -> NoReturn:
        raise TemplateError(
            f"the chat template refuses this conversation: {_line(self.library.string(reason))}",
            hint="change the roles or the order of the messages",
        )

    def _strftime_now(self, form: str) -> str:
        if len(form) > MAX_DATE_FORMAT:
            raise refused(f"a date in more than {MAX_DATE_FORMAT} characters")
        return self._clock().strftime(form)


def _dict(**entries: Any) -> dict[str, Any]:
    return entries


class _Rewrite(NodeTransformer):
    """Puts the budget's operations in place of what Jinja would compile to plain Python. Fills `literals`."""

    def __init__(self, literals: list[PromptText]) -> None:
        self._literals = literals
        self._visitors: dict[type[nodes.Node], Callable[[Any], Any]] = {
            nodes.Template: self._counted,
            nodes.Macro: self._counted,
            nodes.CallBlock: self._counted,
            nodes.For: self._for,
            nodes.Const: self._const,
            nodes.TemplateData: self._data,
            nodes.Concat: self._concat,
            nodes.Compare: self._compare,
            nodes.Getitem: self._getitem,
            nodes.List: self._collect,
            nodes.Tuple: self._collect,
            nodes.Dict: self._collect,
            nodes.Pair: self._pair,
        }

    def get_visitor(self, node: nodes.Node) -> Callable[[Any], nodes.Node] | None:
        return self._visitors.get(type(node))

    def _for(self, node: nodes.For) -> nodes.Node:
        cost = _cost(node.test) if node.test else 0
        self._counted(node)
        if node.test:
            node.test = nodes.And(_call("++", node, nodes.Const(cost)), node.test, lineno=node.lineno)
        return node

    def _counted(self, node: Any) -> Any:
        """A body that pays for its statements each time it is run."""
        cost = 1 + sum(map(_cost, (*node.body, *getattr(node, "defaults", ()))))
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("++", node, nodes.Const(cost)), lineno=node.lineno))
        return node

    def _const(self, node: nodes.Const) -> nodes.Node:
        return self._literal(node, node.value) if isinstance(node.value, str) else node

    def _data(self, node: nodes.TemplateData) -> nodes.Node:
        return self._literal(node, node.data)

    def _literal(self, node: nodes.Node, text: str) -> nodes.Node:
        self._literals.append(PromptText.of(text, SCAFFOLD))
        return _call("''", node, nodes.Const(len(self._literals) - 1))

    def _concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("~", node, *node.nodes)

    def _compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        return _call(
            "?",
            node,
            nodes.Const(" ".join(operand.op for operand in node.ops)),
            node.expr,
            *(operand.expr for operand in node.ops),
        )

    def _getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = (node.arg.start, node.arg.stop, node.arg.step)
        return _call("[:]", node, node.node, *(bound or nodes.Const(None) for bound in bounds))

    def _collect(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") == "store" else _call("[]", node, node)

    def _pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _call("{}", node, node.key)
        return node


def _call(operation: str, at: nodes.Node, first: nodes.Expr, *rest: nodes.Expr) -> nodes.Expr:
    """A call of one of our operations, as a filter: compiled code calls filters directly."""
    return nodes.Filter(first, operation, list(rest), [], None, None, lineno=at.lineno)


def _cost(node: nodes.Node) -> int:
    """Nodes under `node`, without the bodies that pay for themselves."""
    if isinstance(node, nodes.For):
        return 1 + _cost(node.iter) + sum(map(_cost, node.else_))
    if isinstance(node, nodes.Macro):
        return 1
    return 1 + sum(map(_cost, node.iter_child_nodes()))


def _check(tree: nodes.Template) -> frozenset[str]:
    """The names that the template reads. Refuses what no chat template needs, and what would take long to compile."""
    count = 0
    names: dict[str, set[str]] = {"load": set(), "store": set(), "param": set()}
    pending: list[tuple[nodes.Node, int]] = [(tree, 0)]
    while pending:
        node, depth = pending.pop()
        count += 1
        if count > MAX_NODES or depth > MAX_DEPTH or len(names["load"]) + len(names["store"]) > MAX_NAMES:
            _too_large()
        if type(node) not in _ALLOWED_NODES:
            raise refused(f"{{% {type(node).__name__.lower()} %}} in line {node.lineno}")
        if getattr(node, "dyn_args", None) or getattr(node, "dyn_kwargs", None):
            raise refused(f"* or ** in a call in line {node.lineno}")
        if isinstance(node, nodes.Name):
            names[node.ctx].add(node.name)
        elif isinstance(node, nodes.For):
            targets = (node.target, *node.target.find_all(nodes.Name))
            names["param"] |= {"loop"} | {target.name for target in targets if isinstance(target, nodes.Name)}
        pending.extend((child, depth + 1) for child in node.iter_child_nodes())
    return frozenset(names["load"] - names["param"])


def _too_large() -> NoReturn:
    raise TemplateError("the chat template is too long or too deeply nested")


def _line(reason: object) -> str:
    """The text of an error or a reason on one line, shortened."""
    text = " ".join(str(reason).split()) or type(reason).__name__
    return text if len(text) <= MAX_REASON else text[: MAX_REASON - 3] + "..."
