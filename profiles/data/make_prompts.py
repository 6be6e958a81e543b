"""Write the demo's training prompts: Python functions to complete, made from what Python itself carries.

Two kinds: the signature of a standard-library function with a docstring of ours, and a small task that puts a built-in
function or a string method to work on a list or a text, with an example that Python computes. Wording, names and
examples are made here; no docstring is copied. `smollm2-code-prompts.jsonl` is the data: another Python version may
sign its functions differently, so the file is shipped and this script only says how it came about.

    python make_prompts.py smollm2-code-prompts.jsonl
"""

import importlib
import inspect
import itertools
import json
import math
import random
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PROMPT = "Complete the following Python function:\n\n```python\n{code}\n```"

SIGNATURES = {
    "base64": "b64encode b64decode b32encode b16encode b85encode urlsafe_b64encode",
    "bisect": "bisect_left bisect_right insort_left insort_right",
    "calendar": "isleap leapdays monthrange weekday timegm",
    "collections": "namedtuple",
    "colorsys": "rgb_to_hsv hsv_to_rgb rgb_to_hls hls_to_rgb rgb_to_yiq yiq_to_rgb",
    "copy": "copy deepcopy",
    "difflib": "get_close_matches ndiff unified_diff context_diff restore",
    "email.utils": "parseaddr formataddr quote unquote formatdate make_msgid",
    "filecmp": "cmp cmpfiles",
    "fnmatch": "fnmatch fnmatchcase filter translate",
    "functools": "total_ordering wraps",
    "getpass": "getuser",
    "glob": "escape glob iglob",
    "gzip": "compress decompress",
    "heapq": "heappush heappop heapify heapreplace heappushpop merge nlargest nsmallest",
    "html": "escape unescape",
    "inspect": "cleandoc getdoc isabstract isclass isfunction signature",
    "json": "dumps loads dump load",
    "linecache": "getline checkcache",
    "locale": "atof atoi currency delocalize format_string",
    "math": "comb perm dist fmod isclose ldexp copysign remainder",
    "mimetypes": "guess_type guess_extension",
    "ntpath": "splitdrive",
    "operator": "concat contains countOf getitem indexOf mod truediv floordiv xor setitem delitem",
    "os": "makedirs removedirs renames walk fsencode fsdecode",
    "pkgutil": "extend_path iter_modules",
    "posixpath": "basename commonprefix commonpath dirname expanduser isabs join normpath relpath split splitext",
    "pprint": "pformat pprint isreadable isrecursive",
    "quopri": "encodestring decodestring",
    "random": "choice choices gauss randint randrange sample shuffle triangular uniform expovariate betavariate",
    "re": "compile escape findall finditer fullmatch match split sub subn",
    "reprlib": "recursive_repr",
    "shlex": "join quote split",
    "shutil": "copyfile copytree disk_usage move rmtree which make_archive unpack_archive get_terminal_size",
    "statistics": "correlation covariance fmean geometric_mean harmonic_mean linear_regression mean median_high"
    " median_low mode multimode pstdev pvariance quantiles stdev variance",
    "string": "capwords",
    "struct": "calcsize unpack",
    "tempfile": "mkdtemp mkstemp gettempdir",
    "textwrap": "dedent fill indent shorten wrap",
    "threading": "active_count current_thread enumerate",
    "timeit": "timeit repeat",
    "tokenize": "detect_encoding generate_tokens",
    "traceback": "format_exc format_list print_exc",
    "types": "new_class prepare_class",
    "unicodedata": "category normalize",
    "urllib.parse": "parse_qs parse_qsl quote quote_plus unquote urldefrag urlencode urljoin urlparse urlsplit",
    "uuid": "uuid1 uuid4 uuid5",
    "weakref": "proxy getweakrefcount",
    "zipfile": "is_zipfile",
    "zlib": "adler32 compress crc32 decompress",
}
SIGNATURE_DOCS = (
    "Return the {what} of {args}.",
    "Compute the {what} for the given {args} and return it.",
    "Given {args}, return the {what}.",
    "This function takes {args} and gives back the {what}.",
)

WORDS = ["Lime", "42", "fig", "PEAR", "kiwi 7"]
TEXT = "Two red Fish, 15 eggs"
NUMBERS = [4.0, 2.25, 9.0, 6.5]
INTEGERS = [6, 3, 10, 7, 3]
WORD_TESTS = ["isalpha", "isdigit", "isupper", "islower", "istitle", "isidentifier", "isalnum", "isnumeric"]
WORD_TESTS += ["isascii", "isprintable"]
WORD_MAPS = ["upper", "lower", "title", "capitalize", "swapcase", "strip", "casefold", "split", "encode"]
FLOAT_MAPS: dict[str, Callable] = {"floor": math.floor, "ceil": math.ceil, "sqrt": math.sqrt, "trunc": math.trunc}
FLOAT_MAPS |= {"round": round, "int": int, "str": str}
INTEGER_MAPS: dict[str, Callable] = {"bin": bin, "hex": hex, "oct": oct, "float": float, "factorial": math.factorial}
INTEGER_MAPS |= {"isqrt": math.isqrt, "range": lambda x: list(range(x)), "bit_length": int.bit_length, "repr": repr}
TOTALS: dict[str, Callable] = {"sum": sum, "max": max, "min": min, "len": len, "sorted": sorted, "prod": math.prod}
TOTALS |= {"mean": statistics.mean, "median": statistics.median}
INTEGER_TESTS: dict[str, tuple[str, Callable]] = {
    "even": ("even", lambda x: x % 2 == 0),
    "odd": ("odd", lambda x: x % 2 == 1),
    "above": ("greater than the first one", lambda x: x > INTEGERS[0]),
    "below": ("smaller than the last one", lambda x: x < INTEGERS[-1]),
    "divisible_by_three": ("divisible by three", lambda x: x % 3 == 0),
    "perfect_squares": ("a perfect square", lambda x: math.isqrt(x) ** 2 == x),
    "two_digit": ("made of two digits", lambda x: 10 <= x <= 99),
}

# A task: its signature, and below it the docstring.
WORD_TEST_TASKS = """
keep_{kind}(words: List[str]) -> List[str]
    Return the words for which {test} is true.
drop_{kind}(words: List[str]) -> List[str]
    Remove every word that is {kind} from the list of words and return the rest in the same order.
count_{kind}_words(words: List[str]) -> int
    Count the words in the list that are {kind}.
all_words_{kind}(words: List[str]) -> bool
    Return True if all of the given words are {kind}, otherwise return False.
first_{kind}_word(words: List[str]) -> str
    Find the first word that is {kind}. Return None if there is no such word.
{kind}_characters(text: str) -> str
    Given a text, return a string with only those characters of it that are {kind}.
number_of_{kind}_characters(text: str) -> int
    Return the number of {kind} characters in the text.
has_{kind}_character(text: str) -> bool
    Check if the string contains at least one character that is {kind}.
"""
WORD_MAP_TASKS = """
{name}_each(words: List[str]) -> List[str]
    Return a list with the {name} of every word.
{name}_longest(words: List[str]) -> str
    Take the longest word of the list and return its {name}.
{name}_text(text: str) -> str
    Return the text after {name}.
{name}_every_second(text: str) -> str
    Change every second character of the given string by {name} and return the new string.
same_after_{name}(first: str, second: str) -> bool
    Check whether two strings are equal after {name}.
"""
NUMBER_MAP_TASKS = """
{name}_all(numbers: List[{kind}]) -> list
    Apply {name} to each number in the list and return the results.
{name}_largest(numbers: List[{kind}]) -> object
    Return the {name} of the largest number of a list of numbers.
{name}_by_value(numbers: List[{kind}]) -> dict
    Build a dictionary that maps every number to its {name}.
{name}_of_sum(a: {kind}, b: {kind}) -> object
    Add the two numbers a and b and return the {name} of the result.
"""
TOTAL_TASKS = """
{name}_of_squares(numbers: List[int]) -> int
    Square every number in the list, then return the {name} of the squares.
{name}_of_lengths(words: List[str]) -> int
    Return the {name} of the lengths of the words.
{name}_of_differences(numbers: List[int]) -> int
    Return the {name} of the differences between neighbouring numbers.
{name}_of_digits(number: int) -> int
    Given a positive integer number, return the {name} of its digits.
{name}_per_row(rows: List[List[int]]) -> List[int]
    You are given a table as a list of rows. Return the {name} of each row.
{name}_of_two_lists(first: List[int], second: List[int]) -> int
    Join the lists first and second and return the {name} of the joined list.
"""
TOTAL_TEST_TASK = """
{name}_of_{test}(numbers: List[int]) -> int
    Return the {name} of those numbers in the list that are {phrase}.
"""
INTEGER_TEST_TASKS = """
keep_{test}(numbers: List[int]) -> List[int]
    Filter the list of numbers: keep only those that are {phrase}.
count_{test}(numbers: List[int]) -> int
    Return how many numbers in the list are {phrase}.
any_{test}(numbers: List[int]) -> bool
    Return True if any number in the list is {phrase}, else False.
all_{test}(numbers: List[int]) -> bool
    Check if every number is {phrase}.
without_{test}(numbers: List[int]) -> List[int]
    Delete all numbers that are {phrase}.
positions_of_{test}(numbers: List[int]) -> List[int]
    Return the positions of the numbers that are {phrase}.
"""


def fill(tasks: str, examples: list[tuple[str, Any]], **words: str) -> Iterator[tuple[str, str, str, Any]]:
    """Signature, docstring, example arguments and example value of every task of a table."""
    lines = tasks.format(**words).strip().splitlines()
    for head, doc, (given, value) in zip(lines[::2], lines[1::2], examples, strict=True):
        yield head, doc.strip(), given, value


def list_tasks() -> Iterator[tuple[str, str, str, Any]]:
    words, text, integers = repr(WORDS), repr(TEXT), repr(INTEGERS)
    for test in WORD_TESTS:
        holds = getattr(str, test)
        kept, dropped = [w for w in WORDS if holds(w)], [w for w in WORDS if not holds(w)]
        characters = "".join(filter(holds, TEXT))
        of_words = [kept, dropped, len(kept), not dropped, kept[0] if kept else None]
        of_text = [characters, len(characters), bool(characters)]
        examples = [(words, value) for value in of_words] + [(text, value) for value in of_text]
        yield from fill(WORD_TEST_TASKS, examples, test=test, kind=test.removeprefix("is"))
    for name in WORD_MAPS:
        apply = getattr(str, name)
        second = "".join(str(apply(c)) if i % 2 else c for i, c in enumerate(TEXT))
        examples = [(words, [apply(w) for w in WORDS]), (words, apply(max(WORDS, key=len))), (text, apply(TEXT))]
        examples += [(text, second), ("'Oak', 'oak'", apply("Oak") == apply("oak"))]
        yield from fill(WORD_MAP_TASKS, examples, name=name)
    for kind, values, maps in (("float", NUMBERS, FLOAT_MAPS), ("int", INTEGERS, INTEGER_MAPS)):
        for name, apply in maps.items():
            examples = [(repr(values), [apply(x) for x in values]), (repr(values), apply(max(values)))]
            examples += [(repr(values), {x: apply(x) for x in values})]
            examples += [(f"{values[0]!r}, {values[1]!r}", apply(values[0] + values[1]))]
            yield from fill(NUMBER_MAP_TASKS, examples, name=name, kind=kind)
    for name, total in TOTALS.items():
        neighbours = itertools.pairwise(INTEGERS)
        examples = [(integers, total([x * x for x in INTEGERS])), (words, total([len(w) for w in WORDS]))]
        examples += [(integers, total([b - a for a, b in neighbours])), ("1729", total([1, 7, 2, 9]))]
        examples += [("[[1, 2], [5, 3]]", [total([1, 2]), total([5, 3])]), ("[4, 1], [3]", total([4, 1, 3]))]
        yield from fill(TOTAL_TASKS, examples, name=name)
        numbers = [*INTEGERS, 9, 2]
        for test, (phrase, holds) in INTEGER_TESTS.items():
            examples = [(repr(numbers), total([x for x in numbers if holds(x)] or [0]))]
            yield from fill(TOTAL_TEST_TASK, examples, name=name, test=test, phrase=phrase)
    for test, (phrase, holds) in INTEGER_TESTS.items():
        true, positions = [x for x in INTEGERS if holds(x)], [i for i, x in enumerate(INTEGERS) if holds(x)]
        false = [x for x in INTEGERS if not holds(x)]
        results = (true, len(true), bool(true), not false, false, positions)
        yield from fill(INTEGER_TEST_TASKS, [(integers, r) for r in results], test=test, phrase=phrase)


def spell(head: str, doc: str, given: str, value: Any, turn: int) -> str:
    """One function to complete; `turn` rotates type hints and the example through the tasks."""
    if turn % 3 == 0:  # no type hints
        head = re.sub(r": [\w\[\]]+| -> .*", "", head)
    imports = "from typing import List\n\n\n" if "List" in head else ""
    example = f"\n    >>> {head.split('(')[0]}({given})\n    {value!r}" if turn % 2 == 0 else ""
    return f'{imports}def {head}:\n    """ {doc}{example}\n    """'


def signature_tasks() -> Iterator[str]:
    for module, names in SIGNATURES.items():
        for turn, name in enumerate(names.split()):
            signature = inspect.signature(getattr(importlib.import_module(module), name))
            plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
            plain = [p for p in plain if "<" not in str(p)]  # a default such as <object object at 0x...> is no Python
            plain = [p.replace(kind=p.POSITIONAL_OR_KEYWORD) if p.kind == p.POSITIONAL_ONLY else p for p in plain]
            arguments = [p.name for p in plain] or ["nothing"]
            listed = " and ".join([", ".join(arguments[:-1]), arguments[-1]] if arguments[1:] else arguments)
            doc = SIGNATURE_DOCS[turn % len(SIGNATURE_DOCS)].format(what=name.replace("_", " "), args=listed)
            yield f'def {name}{inspect.Signature(plain)}:\n    """ {doc}\n    """'


def prompts() -> list[str]:
    codes = list(signature_tasks()) + [spell(*task, turn) for turn, task in enumerate(list_tasks())]
    random.Random(0).shuffle(codes)  # so that the head of the file is a fair sample
    return [PROMPT.format(code=code) for code in codes]


if __name__ == "__main__":
    rows = [json.dumps({"prompt": prompt}) for prompt in prompts()]
    Path(sys.argv[1]).write_text("\n".join(rows) + "\n", encoding="utf-8")
