"""Rules and dashboards ask only for metrics and labels that exist."""

import json
import re
from pathlib import Path

import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry

from moeless.core.generation import EngineStats
from moeless.server.metrics import ServerMetrics, families_of
from moeless.telemetry.engine_metrics import EngineMetrics
from moeless.telemetry.metric_table import METRICS

DEPLOY = Path(__file__).parents[3] / "deploy"
# What Prometheus itself adds.
TARGET_LABELS = {"instance", "job"}


def known_series():
    """Series name to label names."""
    stats = EngineStats(running=0, waiting=0, max_batch_size=1, max_model_len=1, healthy=True)
    registry = CollectorRegistry()
    EngineMetrics(registry)
    found = {metric.exposed_name: (metric.kind, metric.labels) for metric in METRICS}
    for family in ServerMetrics(lambda: stats).families() + families_of(
        registry, EngineMetrics.LABELS
    ):
        found[family.name] = (family.kind, family.labels)
    series = {"up": TARGET_LABELS}
    for name, (kind, labels) in found.items():
        labels = {*labels, *TARGET_LABELS}
        if kind in {"histogram", "summary"}:
            series |= {f"{name}_sum": labels, f"{name}_count": labels}
        if kind == "histogram":
            series[f"{name}_bucket"] = labels | {"le"}
        else:
            series[name] = labels | ({"quantile"} if kind == "summary" else set())
    return series


KNOWN = known_series()


def rules():
    groups = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboards():
    return sorted((DEPLOY / "grafana").glob("*.json"))


def expressions():
    found = [(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()]
    for path in dashboards():
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", []):
                text = target["expr"].replace("$__rate_interval", "5m")
                found.append((f"{path.stem}: {panel['title']} {target['refId']}", text))
    return found


def walk(node):
    """All nodes of an expression."""
    yield node
    for name in ("lhs", "rhs", "expr", "vector_selector", "param"):
        child = getattr(node, name, None)
        if child is not None and not isinstance(child, str):
            yield from walk(child)
    for child in getattr(node, "args", None) or ():
        yield from walk(child)


@pytest.mark.parametrize(("where", "text"), expressions(), ids=lambda value: str(value)[:40])
def test_an_expression_uses_what_exists(where, text):
    selectors = [
        node
        for node in walk(promql_parser.parse(text))
        if isinstance(node, promql_parser.VectorSelector)
    ]
    names = {selector.name for selector in selectors}
    assert names, where
    assert names <= KNOWN.keys(), where
    # No name in the text has been missed by the walk.
    assert names == {name for name in re.findall(r"[a-z_:]+", text) if name in KNOWN}
    allowed = set.intersection(*(set(KNOWN[name]) for name in names))
    for selector in selectors:
        used = {matcher.name for matcher in selector.matchers.matchers}
        assert used <= KNOWN[selector.name], where
    for grouping in re.findall(r"(?:by|on) \(([^)]*)\)", text):
        assert {label.strip() for label in grouping.split(",")} <= allowed, where


def test_alerts_say_what_is_wrong_and_legends_name_labels_that_exist():
    for rule in rules():
        if "alert" in rule:
            summary = rule["annotations"]["summary"]
            labels = set(re.findall(r"\$labels\.(\w+)", summary))
            assert labels <= set(re.findall(r"\w+", rule["expr"])) | {"instance"}, rule["alert"]
    for path in dashboards():
        panels = json.loads(path.read_text())["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        for panel in panels:
            for target in panel.get("targets", []):
                labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
                grouped = set(re.findall(r"by \((\w+(?:, \w+)*)\)", target["expr"]))
                assert labels <= {part for g in grouped for part in g.split(", ")}, panel["title"]


def test_the_scrape_configuration_reads_the_rules():
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    assert config["rule_files"] == ["rules.yml"]
    assert [job["job_name"] for job in config["scrape_configs"]] == ["moeless"]
