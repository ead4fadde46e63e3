"""Operators, methods, filters and tests give what Jinja's own sandbox gives."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edge_llm.errors import TemplateError
from edge_llm.messages import Message, Role
from edge_llm.text.chat_template import ChatTemplate

TEMPLATES = sorted((Path(__file__).parents[1] / "golden" / "templates").glob("*.jinja"))

EXPRESSIONS = r"""
1 + 2 * 3 - 4 / 2 ;; 7 // 2 ;; 7 % 3 ;; -7 // 2 ;; 2 ** 10 ;; -2 ** 2 ;; 'a' + 'b' ;; 'a' * 3 ;; 3 * 'ab'
[1] * 2 ;; [1] + [2] ;; (1,) + (2, 3) ;; 1 ~ 'a' ~ none ~ true ~ 1.5 ~ [1, 'x'] ~ missing ;; 1 == 1.0
'a' < 'b' ;; 1 != 2 ;; 3 >= 3 ;; not 1 ;; 1 < 2 < 3 ;; 1 < 3 < 2 ;; 1 < 2 > 0 != 5 ;; 1 in [1, 2]
'a' in 'cat' ;; 'x' not in {'x': 1} ;; 1 in missing ;; 1 and 0 or 2 ;; 'a' if 0 else 'b' ;; 'a' if 0
missing or 'x' ;; [1, 2] == [1, 2] ;; {'a': 1} == {'a': 1.0} ;; none is none ;; missing is defined ;; missing
{'a': 1, 2: 'b', none: 3}[2] ;; true + true ;; -true ;; text[0] ;; text[-1] ;; text[1:3] ;; text[::-1]
text[99:] ;; items[0].name ;; items[-1]['name'] ;; items[5] ;; items[1:][0].name ;; mapping.a ;; mapping['a']
mapping.nothing ;; mapping['nothing'] ;; mapping.items()|list ;; mapping['items'] ;; mapping.get('a')
mapping.get('z') ;; mapping.get('z', 9) ;; mapping.keys()|list ;; mapping.values()|list ;; text.nothing
items.nothing ;; (1, 2, 3)[1] ;; (1, 2, 3)[:2] ;; [1, 2, 3][::2] ;; mapping['a', 'b'] ;; text.upper()
text.lower() ;; text.title() ;; text.capitalize() ;; ' a '.strip() ;; 'xax'.strip('x') ;; ' a'.lstrip()
'a '.rstrip() ;; 'a,b,c'.split(',') ;; 'a,b,c'.split(',', 1) ;; ' a  b '.split() ;; 'a,b'.split(sep=',')
'a,b,c'.rsplit(',', 1) ;; 'a\nb\r\nc'.splitlines() ;; 'a\nb'.splitlines(true) ;; 'aXa'.replace('X', 'y')
'aaa'.replace('a', 'b', 2) ;; text.startswith('He') ;; text.endswith('d') ;; text.startswith(('x', 'H'))
text.find('o') ;; text.rfind('o') ;; text.count('l') ;; text.index('l') ;; text.rindex('l')
'-'.join(['a', 'b']) ;; ''.join('abc') ;; '12'.isdigit() ;; 'a1'.isalnum() ;; ' '.isspace() ;; 'Ab'.isupper()
'ab'.islower() ;; 'ab'.isalpha() ;; '5'.isnumeric() ;; 'prefix-x'.removeprefix('prefix-')
'x.y'.removesuffix('.y') ;; [1, 2, 1].count(1) ;; [1, 2].index(2) ;; text|upper ;; text|lower
'hello wOrld-foo (bar)'|title ;; 'hELLO'|capitalize ;; ' a '|trim ;; 'xax'|trim('x') ;; 'aXbX'|replace('X', '-')
'aaa'|replace('a', 'b', 2) ;; 5|replace('5', '6') ;; [1, 2]|join(', ') ;; 'abc'|join('-')
items|join('+', 'name') ;; 'a\nb\n\nc'|indent ;; 'a\nb'|indent(2, true) ;; 'a\n\nb'|indent(2, blank=true)
'a\nb'|indent('> ') ;; missing|default('x') ;; ''|default('x', true) ;; none|d('x') ;; 0|default('x')
[3, 1, 2]|sort ;; ['b', 'A', 'c']|sort ;; ['b', 'A']|sort(case_sensitive=true) ;; [1, 3]|sort(reverse=true)
items|sort(attribute='name')|map(attribute='name')|list ;; {'b': 1, 'A': 2, 'c': 0}|dictsort
{'b': 1, 'a': 2}|dictsort(by='value') ;; {'b': 1, 'a': 2}|dictsort(reverse=true)
[1, 2, 1, 'a', 'A']|unique|list ;; [1, 2]|first ;; [1, 2]|last ;; []|first ;; 'ab'|last ;; mapping|first
[1, 2]|length ;; text|count ;; missing|length ;; [1, 2]|reverse|list ;; 'abc'|reverse ;; 'abc'|list
mapping|list ;; range(3)|list ;; missing|list ;; mapping|items|list ;; missing|items|list
items|map(attribute='name')|list ;; items|map(attribute='no', default='?')|list ;; ['a']|map('upper')|list
['a b']|map('replace', ' ', '_')|list ;; [[1, 2], [3]]|map('first')|list ;; items|map(attribute='deep.0.x')|list
[0, 1, '', 'a']|select|list ;; [1, 2, 3]|select('odd')|list ;; [1, 2, 3]|reject('gt', 1)|list
items|selectattr('name', 'equalto', 'b')|map(attribute='name')|list ;; items|selectattr('flag')|list|length
items|rejectattr('flag')|list|length ;; ['a', none]|select('none')|list ;; ['a', 'b']|select('in', ['a'])|list
'12'|int ;; '1.5'|int ;; 'x'|int ;; 'x'|int(7) ;; 'ff'|int(base=16) ;; 3.9|int ;; none|int ;; '1.5'|float
'x'|float ;; 'x'|float(2.0) ;; 3|float ;; 2.567|round ;; 2.567|round(1) ;; 25|round(-1) ;; 1|string
[1, 'a']|string ;; none|string ;; 'a'|string|length ;; 'a'|safe|length ;; 1 is odd ;; 2 is even
6 is divisibleby(3) ;; 6 is divisibleby 4 ;; 1 is number ;; 1.5 is float ;; 1 is integer ;; true is boolean
true is number ;; 'a' is string ;; {} is mapping ;; [] is sequence ;; {} is sequence ;; 'a' is iterable
1 is iterable ;; 1 is eq(1) ;; 1 is equalto(2) ;; 1 is ne(2) ;; 2 is gt(1) ;; 2 is ge(2) ;; 1 is lt(2)
1 is le(1) ;; 1 is in([1]) ;; true is true ;; false is false ;; 1 is true ;; none is sameas(none)
missing is undefined ;; text is defined ;; text is not none
"""
"""expressions with ;; between"""
DATA: dict[str, Any] = {
    "text": "Hello world",
    "mapping": {"a": 1, "items": 2, "b": [1, 2]},
    "items": [{"name": "b", "flag": True, "deep": [{"x": 1}]}, {"name": "a", "flag": False, "deep": [{"x": 2}]}],
}
STATEMENTS = r"""
{% for a, b in [(1, 2), (3, 4)] %}{{ a + b }}{% else %}none{% endfor %}{% for x in [] %}{% else %}empty\
{% endfor %}
{% for x in 'abc' %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}\
{{ loop.revindex }}{% endfor %}
{% for x in [1, 2, 3] %}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.cycle('a', 'b') }}{% endfor %}
{% for x in [1, 2, 3, 4] if x % 2 %}{{ x }}{{ loop.length }}{% endfor %}{% for k in mapping %}{{ k }}\
{% endfor %}
{% for x in [[1, [2]], [3]] recursive %}{{ x if x is number else loop(x) }}{{ loop.depth }}{% endfor %}
{% set x = 1 %}{% for i in [1] %}{% set x = 2 %}{{ x }}{% endfor %}{{ x }}{% if true %}{% set x = 3 %}\
{% endif %}{{ x }}
{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set ns = namespace(n=0, t='') %}{% for i in range(3) %}\
{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}
{% macro m(a, b='x', c=b) %}{{ a }}{{ b }}{{ c }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1) }}\
{{ m(1, 2, 3, 4, k=5) }}
{% macro m() %}<{{ caller(1) }}>{% endmacro %}{% call(x) m() %}{{ x }}!{% endcall %}
{% set t %} a {{ text }} {% endset %}[{{ t | trim }}]{% filter upper %}a{{ text }}{% endfilter %}
{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{{ a }}{% raw %}{{ raw }}{% endraw %}{# no #}
{% for x in range(9) %}{% if x == 2 %}{% continue %}{% elif x == 4 %}{% break %}{% endif %}{{ x }}{% endfor %}
{{ items | selectattr('flag') | map(attribute='name') | first }}{{ dict(a=1) }}{{ range(1, 9, 3) | list }}
"""
"""a template a line, or several lines joined by a backslash"""
WHITE_SPACE = "  {% if text %}\n  yes\n  {%- elif 1 %} no {% else %} never {% endif -%}\n end\n\n"


def both(source: str) -> tuple[str | None, str | None]:
    """What we make of a template and what Jinja makes of it; None for an error."""
    peer = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    setting = "".join(f"{{% set {name} = {value!r} %}}" for name, value in DATA.items())
    try:
        expected = peer.from_string(setting + source).render()
    except Exception:
        expected = None
    try:
        return ChatTemplate(setting + source).render([]).text, expected
    except TemplateError:
        return None, expected


@pytest.mark.parametrize("expression", re.split(r" ;; |\n", EXPRESSIONS.strip()))
def test_expressions(expression: str) -> None:
    ours, expected = both("{{ [" + expression + "] | string }}")
    assert ours == expected
    assert ours is not None


@pytest.mark.parametrize("source", [*STATEMENTS.replace("\\\n", "").strip().split("\n"), WHITE_SPACE])
def test_statements(source: str) -> None:
    ours, expected = both(source)
    assert ours == expected
    assert ours is not None


@pytest.mark.parametrize(
    "expression",
    [
        "1 + 'a'", "missing.x", "missing()", "text()", "mapping.items.x.y", "1 / 0", "[] + 'a'", "none | sort",
        "{[1]: 2}",
        "text.nothing()", "[1, 'a'] | sort", "5 | length", "text.index('zz')", "[1].index(9)", "mapping.get()",
        "items | map('nothing') | list", "[1] | items | list", "'a' < 1", "range('a')", "text.split('')",
    ],
)  # fmt: skip
def test_what_fails_there_fails_here(expression: str) -> None:
    ours, expected = both("{{ " + expression + " }}")
    assert ours is None
    assert expected is None


@given(st.sampled_from(TEMPLATES), st.integers())
def test_damaged_templates_raise_only_template_errors(path: Path, seed: int) -> None:
    """Pieces of sound templates swapped, cut and repeated: refused, or rendered."""
    rng = random.Random(seed)
    source = path.read_text(encoding="utf-8")
    for _ in range(rng.randrange(1, 4)):
        start, end = sorted(rng.randrange(len(source) + 1) for _ in range(2))
        place = rng.randrange(len(source) + 1)
        source = rng.choice(
            [source[:start] + source[end:], source[:place] + source[start : min(end, start + 40)] + source[place:]]
        )
    messages = [Message.user("hi"), Message(Role.TOOL, "x")]
    try:
        said = ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages).origins
    except TemplateError as error:
        said = str(error)
    assert "\n" not in said


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
    )
)
def test_json_is_pythons(value: Any) -> None:
    tool = {"f": value}
    assert ChatTemplate("{{ tools[0].f | tojson }}").render([], tools=[tool]).text == json.dumps(
        value, ensure_ascii=False
    )
