"""Arguments against JSON schemas, as get_json_schema and servers of tools write them."""

from cohort.environments.schemas import problem_with, value_of
from tests.conftest import each

ANY_OF = {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "string"}}]}
NESTED = {
    "type": "object",
    "properties": {"at": {"type": "array", "prefixItems": [{"type": "number"}, {"type": "string"}]}},
    "required": ["at"],
    "additionalProperties": False,
}


@each(
    ("schema", "value", "problem"),
    [
        ({"type": "number"}, 3, ""),
        ({"type": "number"}, True, "must be a number, got True"),
        ({"type": "boolean"}, 1, "must be true or false, got 1"),
        ({"type": ["integer", "string"]}, [], "must be an integer or a string, got []"),
        ({"type": "integer", "nullable": True}, None, ""),
        ({"type": "string", "nullable": True}, 3, "must be a string or null, got 3"),
        ({}, object, ""),
        ({"type": "image"}, "x", ""),
        (True, "x", ""),
        (ANY_OF, 3, ""),
        (ANY_OF, ["x"], ""),
        (ANY_OF, [3], "must be an integer or a list, got [3]"),
        ({"enum": [1, 2]}, 2, ""),
        ({"enum": [1, 2]}, True, "must be one of [1, 2], got True"),
        ({"const": "x"}, "y", "must be one of ['x'], got 'y'"),
        ({"type": "array", "items": {"type": "integer"}}, [1, "2"], ", item 1, must be an integer, got '2'"),
        (
            {"type": "object", "additionalProperties": {"type": "integer"}},
            {"k": "v"},
            ", key 'k', must be an integer, got 'v'",
        ),
        (NESTED, {"at": [0.5, "x", None]}, ""),
        (NESTED, {"at": ["x"]}, ", key 'at',, item 0, must be a number, got 'x'"),
        (NESTED, {"to": 1}, " lacks the key 'at'; the argument 'x' has the unknown key 'to'"),
    ],
)
def test_a_value_against_a_schema(schema, value, problem):
    found = problem_with({"x": value}, {"properties": {"x": schema}})
    expected = f"the argument 'x'{'' if problem[:1] in ', ' else ' '}{problem}" if problem else ""
    assert found == expected


def test_arguments_beyond_the_properties():
    assert problem_with({"x": 1}, {"additionalProperties": {"type": "integer"}}) == ""
    assert problem_with({"x": "1"}, {"additionalProperties": {"type": "integer"}}) != ""
    assert problem_with({"x": 1}, {"additionalProperties": True}) == ""
    assert problem_with({"x": 1}, {}) == "unknown argument 'x'"


def test_at_most_four_problems_are_listed():
    assert problem_with(dict.fromkeys("abcdefgh", 1), {}).count(";") == 3


@each(
    ("text", "schema", "value"),
    [
        ("3", {"type": "integer"}, 3),
        (" 3\n", {"type": "integer"}, 3),
        ("3.0", {"type": "integer"}, "3.0"),
        ("3", {"type": "number"}, 3),
        ("1e-07", {"type": "number"}, 1e-07),
        ("NaN", {"type": "number"}, "NaN"),
        ("True", {"type": "boolean"}, True),
        ("false", {"type": "boolean"}, False),
        ("1", {"type": "boolean"}, "1"),
        ("None", {"type": "string", "nullable": True}, None),
        ("none", {"type": "string", "nullable": True}, "none"),
        ("3", {"type": ["integer", "string"]}, 3),
        ("x", {"type": ["integer", "string"]}, "x"),
        ("{'a': [1, None]}", {"type": "object"}, {"a": [1, None]}),
        ('{"a": [1, null]}', {"type": "object"}, {"a": [1, None]}),
        ("[1]", {"type": "string"}, "[1]"),
        ('"quoted"', {"type": "string"}, '"quoted"'),
        ("3", None, 3),
        ("{1, 2}", None, "{1, 2}"),
        ("1j", None, "1j"),
        ("\\d", None, "\\d"),
        ("'\\d'", {"type": "array"}, "'\\d'"),
        ("[" * 5000, {"type": "array"}, "[" * 5000),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
    ],
)
def test_the_value_that_a_text_means(text, schema, value):
    found = value_of(text, schema)
    assert (found, type(found)) == (value, type(value))
