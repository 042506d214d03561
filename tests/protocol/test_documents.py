"""docs/protocol.md, docs/asyncapi.yaml and the clients in other languages say what the gateway's codec does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import yaml
from jsonschema import Draft7Validator  # type: ignore[import-untyped]

from gateway import wire

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs/protocol.md").read_text(encoding="utf-8")
ASYNCAPI: dict[str, Any] = yaml.safe_load((ROOT / "docs/asyncapi.yaml").read_text(encoding="utf-8"))
CLIENT_KINDS: tuple[type[msgspec.Struct], ...] = get_args(wire.ClientFrame)
SERVER_KINDS: tuple[type[msgspec.Struct], ...] = get_args(wire.ServerFrame)


def frames_in(kind: str) -> list[str]:
    """The lines of all boxes of one kind, one frame each."""
    return [line for box in re.findall(rf"```json {kind}\n(.*?)```", PAGE, re.DOTALL) for line in box.splitlines()]


def tag(kind: type[msgspec.Struct]) -> str:
    return str(kind.__struct_config__.tag)


def normal(frame: str) -> Any:
    """A frame as plain data, with the defaults that `welcome` may leave out."""
    data = json.loads(frame)
    if data["type"] == "welcome":
        data["limits"] = {"frame_bytes": wire.MAX_FRAME, "words": wire.MAX_WORDS, **data["limits"]}
    return data


@pytest.mark.parametrize("frame", frames_in("client"))
def test_each_client_frame_on_the_page_is_the_codecs_own_to_the_byte(frame: str) -> None:
    assert wire.encode(wire.decode_client(frame)) == frame


@pytest.mark.parametrize("frame", frames_in("gateway"))
def test_each_gateway_frame_on_the_page_is_the_codecs_own_to_the_byte(frame: str) -> None:
    encoded = wire.encode(wire.decode_server(frame))
    assert normal(encoded) == normal(frame)
    assert encoded == frame or json.loads(frame)["type"] == "welcome"


@pytest.mark.parametrize("frame", frames_in("refused"))
def test_each_frame_that_the_page_calls_refused_is_refused(frame: str) -> None:
    with pytest.raises(msgspec.DecodeError):
        wire.decode_client(frame)


def test_the_page_shows_every_kind_of_frame_with_every_field() -> None:
    shown = [json.loads(frame) for frame in frames_in("client") + frames_in("gateway")]
    for kind in CLIENT_KINDS + SERVER_KINDS:
        fields = {field for frame in shown if frame["type"] == tag(kind) for field in frame} - {"type"}
        assert fields == set(kind.__struct_encode_fields__), tag(kind)


def test_the_page_explains_every_error_code_close_code_ending_and_limit() -> None:
    rows = set(re.findall(r"^\| `?([a-z_0-9]+)`?(?: \([^)]*\))? \|", PAGE, re.MULTILINE))
    expected = {
        *wire.ERROR_CODES,
        *get_args(wire.FinishReason),
        *(str(code.value) for code in wire.Close),
        *wire.Limits.__struct_fields__,
    }
    assert expected <= rows, expected - rows


def test_the_page_tells_the_codecs_own_numbers() -> None:
    assert f"at most {wire.MAX_FRAME // 1024} KiB" in PAGE
    assert f"within {wire.HELLO_TIMEOUT_S} seconds" in PAGE
    assert f"`frame_bytes` ({wire.MAX_FRAME})" in PAGE
    assert f"`words` ({wire.MAX_WORDS})" in PAGE


def test_every_file_and_section_that_the_page_links_to_is_there() -> None:
    sections = {re.sub(r"[^a-z ]", "", head.lower()).replace(" ", "-") for head in re.findall(r"^#+ (.*)", PAGE, re.M)}
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        file, _, section = target.partition("#")
        assert not file or (ROOT / "docs" / file).exists(), target
        assert not section or section in sections, target


def test_the_asyncapi_document_is_valid() -> None:
    schema = json.loads((Path(__file__).parent / "asyncapi-3.0.json").read_text(encoding="utf-8"))
    errors = Draft7Validator(schema).iter_errors(ASYNCAPI)
    assert [f"{error.json_path}: {error.message[:200]}" for error in errors] == []


def test_every_reference_in_the_asyncapi_document_leads_somewhere() -> None:
    for reference in re.findall(r"\$ref: '#/([^']+)'", (ROOT / "docs/asyncapi.yaml").read_text(encoding="utf-8")):
        place: Any = ASYNCAPI
        for step in reference.split("/"):
            assert step in place, reference
            place = place[step]


def test_the_asyncapi_schemas_are_those_of_the_codec() -> None:
    kinds = CLIENT_KINDS + SERVER_KINDS
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    assert ASYNCAPI["components"]["schemas"] == as_draft_7(schemas)


def as_draft_7(schema: Any) -> Any:
    """AsyncAPI's own schemas know no `prefixItems`."""
    if isinstance(schema, dict):
        items = {"items": as_draft_7(schema["prefixItems"][0])} if "prefixItems" in schema else {}
        return {key: as_draft_7(part) for key, part in schema.items() if key != "prefixItems"} | items
    return [as_draft_7(part) for part in schema] if isinstance(schema, list | tuple) else schema


@pytest.mark.parametrize("name", [tag(kind) for kind in CLIENT_KINDS + SERVER_KINDS])
def test_the_asyncapi_examples_fit_their_schema_and_decode(name: str) -> None:
    message = ASYNCAPI["components"]["messages"][name]
    schema = {**message["payload"], "components": ASYNCAPI["components"]}
    decode = wire.decode_client if name in {tag(kind) for kind in CLIENT_KINDS} else wire.decode_server
    assert message["examples"]
    for example in message["examples"]:
        Draft7Validator(schema).validate(example["payload"])
        assert tag(type(decode(json.dumps(example["payload"])))) == name


@pytest.mark.parametrize("client", ["docs/godot/campfire.gd", "gateway/page/client.js"])
def test_the_clients_know_every_frame_and_field_that_they_must(client: str) -> None:
    source = (ROOT / client).read_text(encoding="utf-8")
    said = set(re.findall(r"\w+", source))
    assert {tag(kind) for kind in CLIENT_KINDS + SERVER_KINDS} <= said
    assert {"temporary", "retry_after_ms", "in_ms", "cursor", "limits", "4500"} <= said
    assert re.search(r"PROTOCOL :?= (\d+)", source)[1] == str(wire.PROTOCOL)  # type: ignore[index]
