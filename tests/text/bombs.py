"""F23: templates that would run for ever or fill the memory. Run as a script, it renders each in a process of its own.

Prints one JSON object: for each bomb what came of it, and by how many MiB the process grew. A bomb that is not stopped
is killed by the kernel: 5 s of processor time, 512 MiB more than the start.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any

NESTED = "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}"
NESTED += "{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
TUPLES = "{% set ns = namespace(a=(1,)) %}{% for i in range(60) %}{% set ns.a = (ns.a, ns.a) %}{% endfor %}"
MAPPINGS = "{% set ns = namespace(a={}, b={}) %}{% for i in range(60) %}{% set ns.a = {'x': ns.a, 'y': ns.a} %}"
MAPPINGS += "{% set ns.b = {'x': ns.b, 'y': ns.b} %}{% endfor %}"
LONG = "{% set a = 'a' * 60000 %}"
ENDLESS = "{% for i in range(60000) %}{% for j in range(60000) %}"
ENDED = "{% endfor %}{% endfor %}"


def always(statement: str) -> str:
    return ENDLESS + statement + ENDED


def doubled(operation: str, start: str = "'aaaaaaaa'") -> str:
    return (
        "{% set ns = namespace(a="
        + start
        + ") %}{% for i in range(60) %}{% set ns.a = "
        + operation
        + " %}{% endfor %}"
    )


def kept(value: str) -> str:
    return "{% set ns = namespace(kept=[]) %}" + LONG + always("{% set ns.kept = [ns.kept, " + value + "] %}")


BOMBS = {
    # texts
    "width by %": "{{ '%999999999d' % 1 }}",
    "format filter": "{{ '%999999999d' | format(1) }}",
    "format method": "{{ '{:999999999d}'.format(1) }}",
    "format_map": "{{ '{a:999999999d}'.format_map({'a': 1}) }}",
    "center filter": "{{ 'a' | center(500000000) }}",
    "center method": "{{ 'a'.center(500000000) }}",
    "ljust": "{{ 'a'.ljust(500000000) }}",
    "rjust": "{{ 'a'.rjust(500000000) }}",
    "zfill": "{{ '1'.zfill(500000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(500000000) }}",
    "translate": "{{ 'a'.translate({97: 'b' * 60000}) }}",
    "encode": "{{ 'a'.encode('utf-32') }}",
    "text times number": "{{ 'a' * 10**9 }}",
    "number times text": "{{ 1000000000 * 'a' }}",
    "doubling by +": doubled("ns.a + ns.a"),
    "doubling by ~": doubled("ns.a ~ ns.a"),
    "doubling by join": doubled("[ns.a, ns.a] | join"),
    "doubling by replace": doubled("ns.a | replace('a', 'aa')"),
    "doubling by blocks": "{% set a = 'aaaaaaaa' %}" + "{% set a %}{{ a }}{{ a }}{% endset %}" * 60,
    "doubling by filter blocks": "{% set a = 'aa' %}"
    + "{% set a %}{% filter upper %}{{ a }}{{ a }}{% endfilter %}{% endset %}" * 60,
    "doubling by call blocks": "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call m() %}" * 16 + "a" * 500 + "{% endcall %}" * 16,
    "replace filter": LONG + "{{ a | replace('a', a) }}",
    "replace method": LONG + "{{ a.replace('a', a) }}",
    "replace of nothing": LONG + "{{ a.replace('', a) }}",
    "join filter": LONG + "{{ a | list | join(a) }}",
    "join method": LONG + "{{ a.join(a) }}",
    "indent width": "{{ ('a\n' * 30000) | indent(100000) }}",
    "indent text": LONG + "{{ ('a\n' * 30000) | indent(a) }}",
    "indent again": always("{{ ('a\n' * 30000) | indent(64) }}"),
    "output": always("aaaaaaaaaaaaaaaa"),
    "kept texts": kept("'a' * 1000"),
    "upper of growing letters": LONG + always("{% set x = 'ΐ' * 60000 %}{% set y = x | upper %}"),
    "title": LONG + always("{% set x = a | title %}"),
    "split": always("{% set x = ('a ' * 30000).split() %}"),
    "splitlines": always("{% set x = ('a\n' * 30000).splitlines() %}"),
    "find": LONG + always("{% set x = a.find('a' * 30000 + 'b') %}"),
    "rfind": LONG + always("{% set x = a.rfind('ab' + 'a' * 30000) %}"),
    "rsplit": LONG + always("{% set x = a.rsplit('ab' + 'a' * 30000) %}"),
    "count": LONG + always("{% set x = a.count('a' * 50 + 'b') %}"),
    "in": LONG + always("{% set x = 'a' * 300 + 'b' in a %}"),
    "backwards": LONG + always("{% set x = a[::-1] %}"),
    "date format": "{{ strftime_now('%Y' * 30000) }}",
    # numbers
    "power": "{{ 2 ** 100000000 }}",
    "power of a power": "{{ (2 ** 1000) ** 1000 }}",
    "growing number": doubled("ns.a * ns.a", "9"),
    "literal number": "{{ " + "9" * 5000 + " }}",
    "round": "{{ 15 | round(-10**9) }}",
    "even": "{{ '%999999999d' is even }}",
    "odd": "{{ '%999999999d' is odd }}",
    "divisibleby": "{{ '%999999999d' is divisibleby(3) }}",
    "select even": "{{ ['%999999999d'] | select('even') | list }}",
    # lists
    "list times number": "{{ [1] * 10**9 }}",
    "doubling lists": doubled("ns.a + ns.a", "[1]"),
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "range as a list": "{{ range(10**12) | list }}",
    "batch": "{{ [1] | batch(10**9, 0) | list }}",
    "slice": "{{ [1] | slice(10**9) | list }}",
    "map": always("{% set x = range(60000) | map('string') | list %}"),
    "map replace": LONG + "{{ range(60000) | map('replace', '1', a) | list }}",
    "select": always("{% set x = range(60000) | select('eq', 1) | list %}"),
    "sort": always("{% set x = range(60000) | sort %}"),
    "sort long keys": LONG + always("{% set x = ([a] * 60000) | sort %}"),
    "sum of lists": "{{ [[1]] | sum(start=[]) }}",
    "kept lists": kept("[1] * 1000"),
    "kept slices": "{% set l = [1] * 60000 %}" + kept("l[1:]"),
    "kept items": kept("messages[0].items()"),
    "long literal list": kept("[" + "0," * 3000 + "]"),
    "many literal lists": kept("[" + "[]," * 3000 + "]"),
    # a small value that is large when walked through
    "text of a tree": NESTED + "{{ ns.a }}",
    "JSON of a tree": NESTED + "{{ ns.a | tojson }}",
    "reason of a tree": NESTED + "{{ raise_exception(ns.a) }}",
    "namespace of trees": TUPLES + "{{ namespace([(ns.a, 1)]) }}",
    "date of a tree": NESTED + "{{ strftime_now(ns.a) }}",
    "trees compared": NESTED + "{{ ns.a == ns.b }}",
    "trees ordered": NESTED + "{{ ns.a < ns.b }}",
    "tree in a list": NESTED + "{{ ns.a in [ns.b] }}",
    "tree by test": NESTED + "{{ ns.a is eq(ns.b) }}",
    "trees selected": NESTED + "{{ [ns.a] | select('eq', ns.b) | list }}",
    "trees sorted": NESTED + "{{ [ns.a, ns.b] | sort }}",
    "tree found": NESTED + "{{ [ns.a].index(ns.b) }}",
    "trees counted": NESTED + "{{ [ns.a, ns.a].count(ns.b) }}",
    "mappings compared": MAPPINGS + "{{ ns.a == ns.b }}",
    "methods compared": MAPPINGS + "{{ ns.a.items == ns.b.items }}{{ ns.a == ns.b }}",
    "tree as a key": TUPLES + "{{ {ns.a: 1} }}",
    "tree looked up": TUPLES + "{{ {'x': 1}[ns.a].y }}",
    "tree got": TUPLES + "{{ {'x': 1}.get(ns.a) }}",
    "trees made unique": TUPLES + "{{ [ns.a, ns.a] | unique }}",
    "deep list": "{% set ns = namespace(a=[]) %}" + "{% set ns.a = [[[[ns.a]]]] %}" * 200 + "{{ ns.a }}",
    "many long texts as JSON": LONG + "{{ ([a] * 1000) | tojson }}",
    "many long texts as text": LONG + "{{ ([a] * 1000) | string }}",
    "JSON indent": "{{ [[[[1]]]] | tojson(indent=1000000000) }}",
    "JSON separators": LONG + "{{ [1, 2] | tojson(separators=(a, a)) }}",
    # loops and calls
    "nested loops": always(""),
    "loop that selects nothing": "{% for i in range(60000) %}{% for j in range(60000) if false %}" + ENDED,
    "loop that compares": "{% for i in range(60000) %}{% for j in range(60000) if j < 0 %}" + ENDED,
    "else of an empty loop": "{% for i in range(60000) %}{% for j in [] %}{% else %}" + "{{ i or i }}" * 1500 + ENDED,
    "recursive macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "mutual macros": "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}",
    "tree of macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
    "text of macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% else %}"
    + "a" * 60 + "{% endif %}{% endmacro %}{{ m(30) }}",
    "slow default": "{% macro m(a=" + "+".join(["1"] * 90) + ") %}{% endmacro %}" + always("{{ m() }}"),
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "tree of loops": "{% for x in [1, 1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "kept namespaces": kept("namespace(a=ns.kept)"),
    "kept macros": "{% set ns = namespace(kept=[]) %}"
    + always("{% macro m() %}{% endmacro %}{% set ns.kept = [m, ns.kept] %}"),
    # what runs while compiling
    "constant folded": "{{ 'a' | center(500000000) }}{% set x = 'a' * 500000000 %}",
    "chain of comparisons": "{{ " + "1 < (" * 40 + "1" + " < 2) < 3" * 40 + " }}" + "{{ 1 / 0 }}",
    "deep parentheses": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "deep lists": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "deep ifs": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "deep loops": "{% for a in [1] %}" * 90 + "{% endfor %}" * 90,
    "long sum": "{{ " + "+".join(["1"] * 100000) + " }}",
    "long condition": "{{ " + " and ".join(["a"] * 30000) + " }}",
    "many names": "".join(f"{{% set a{i} = 1 %}}" for i in range(9000)),
    "many names in many branches": "".join(f"{{% set a{i} = 1 %}}" for i in range(250))
    + "{% if x %}{% set y = 1 %}{% endif %}" * 2500,
    "many branches": "{% if a %}" + "{% elif a %}" * 15000 + "{% endif %}",
    "many outputs": "{{ a }}" * 37000,
    "many comments": "x{#y#}" * 40000,
    "open tags": "{{" * 130000,
    "open blocks": "{%" * 130000,
    "unclosed raw": "{% raw %}{%" + " " * 260000,
    "escapes": "{{ '" + "\\" * 260000,
    "digits": "{{ " + "1" * 260000,
    "digits with lines": "{{ " + "1_" * 130000,
    "minus signs": "{{ " + "-" * 200000 + "1 }}",
    "large source": "x" * 300000,
    "long text": "x" * 260000,
    # names that are not there
    "lipsum": "{{ lipsum(n=10000000) }}",
    "cycler": "{{ cycler(1, 2).next() }}",
    "wordwrap": "{{ ('a ' * 30000) | wordwrap(1) }}",
    "pprint": NESTED + "{{ ns.a | pprint }}",
    "striptags": LONG + "{{ a | striptags }}",
    "urlize": LONG + "{{ a | urlize }}",
}  # fmt: skip


def defuse(source: str) -> dict[str, Any]:
    """Renders a bomb in a forked process, under hard limits."""
    from edge_llm.errors import TemplateError
    from edge_llm.messages import Message
    from edge_llm.text.chat_template import ChatTemplate

    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (5, 5))
        with open("/proc/self/statm") as file:
            start = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (start + (512 << 20),) * 2)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            outcome = "rendered " + ChatTemplate(source).render([Message.user("hi")]).text[:60]
        except TemplateError as error:
            outcome = f"refused: {error}"
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
        os.write(writing, json.dumps({"outcome": outcome[:300], "mib": grown}).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        said = file.read()
    os.waitpid(child, 0)
    return json.loads(said) if said else {"outcome": "killed", "mib": 0}


if __name__ == "__main__":
    json.dump({name: defuse(source) for name, source in BOMBS.items()}, sys.stdout)
