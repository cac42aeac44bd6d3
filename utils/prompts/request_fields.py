"""The fields of a request beside its text: earlier messages, tools, the response format, keywords of the template.

They have the names and forms of OpenAI's chat completions and of vLLM. Settings and prompt files hold them as one JSON
text, "" without any. Nothing heavy is imported.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from utils.errors import UserError, check_choice
from utils.text import encodable

EXAMPLE = '{"chat_template_kwargs": {"enable_thinking": false}}'
SENT = ("tools", "tool_choice", "response_format", "chat_template_kwargs")  # to servers as they are
# `last` has the further fields of the last message, whose content is the text of the prompt.
FORMS: dict[str, type | tuple[type, ...]] = {
    "messages": list,
    "last": dict,
    "tools": list,
    "tool_choice": (str, dict),
    "response_format": dict,
    "chat_template_kwargs": dict,
}
FORMATS = ("text", "json_object", "json_schema")
FORMAT_EXAMPLE = '{"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}}'


def parse_request(text: str) -> str:
    """The fields of a JSON text in their stored form. Raises UserError if they are not valid."""
    try:
        fields = json.loads(encodable(text))
    except (ValueError, RecursionError) as error:
        raise UserError(f"this is not valid JSON; write for example {EXAMPLE}.") from error
    if not isinstance(fields, dict):
        raise UserError(f"it must be a JSON object, for example {EXAMPLE}.")
    for name, value in fields.items():
        if not isinstance(value, FORMS[check_choice(name, tuple(FORMS), "the field")]):
            raise UserError(f"{name} has the wrong type; write for example {EXAMPLE}.")
    for name in ("messages", "tools"):
        if not all(isinstance(part, dict) for part in fields.get(name, ())):
            raise UserError(f"{name} must be a list of JSON objects.")
    if not all(isinstance(one.get("role"), str) and isinstance(_text(one), str) for one in fields.get("messages", ())):
        raise UserError("each of the messages needs a role, and a content that is text.")
    fields = {name: value for name, value in fields.items() if value}
    request = json.dumps(fields, ensure_ascii=False) if fields else ""
    if fields.get("response_format", {}).get("type") in FORMATS:  # servers may have further types
        grammar_text(request)
    return request


@lru_cache(64)
def grammar_text(request: str) -> str:
    """The response format as a grammar of llguidance, or "" for free text. Raises UserError if it is not supported."""
    from llguidance import LLMatcher  # takes a tenth of a second, which --help should not

    response = json.loads(request or "{}").get("response_format", {"type": "text"})
    kind, named = response.get("type"), response.get("json_schema")
    if check_choice(str(kind), FORMATS, "for local models the type of response_format") == "text":
        return ""
    schema = {"type": "object"} if kind == "json_object" else named.get("schema") if isinstance(named, dict) else None
    if not isinstance(schema, dict):
        raise UserError(f"response_format needs a schema; write for example {FORMAT_EXAMPLE}.")
    # As models write JSON on one line. Where blanks are not optional, more tokens are forced.
    grammar = LLMatcher.grammar_from_json_schema(
        schema, {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    )
    if problem := LLMatcher.validate_grammar(grammar):
        raise UserError(f"the schema of response_format is not supported: {problem.splitlines()[0]}.")
    return grammar


def request_of(entry: Mapping[str, Any]) -> tuple[list[str], str] | None:
    """A list with the text of the last message, and the other fields of a logged request. None if that message has no
    text.

    A text is a string or OpenAI's list of parts. Raises UserError if another field is not valid.
    """
    messages = entry["messages"]
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        return None
    *earlier, last = ({**one, "content": _text(one)} for one in messages)
    if not isinstance(last["content"], str) or not last["content"].strip():
        return None
    further = {name: value for name, value in last.items() if name != "content"}
    fields = {"messages": earlier, "last": {} if further == {"role": "user"} else further}
    return [last["content"]], parse_request(json.dumps(fields | logged_fields(entry)))


def logged_fields(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: entry[name] for name in SENT if entry.get(name) is not None}


def _text(message: Mapping[str, Any]) -> Any:
    """The content of a message as text. Raises UserError for parts that are not text."""
    content = message.get("content")
    if content is None:  # beside calls of tools
        return ""
    if not isinstance(content, list):
        return content
    parts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if len(parts) < len(content):
        raise UserError("one of the messages has a part that is not text, such as an image.")
    return "".join(parts)
