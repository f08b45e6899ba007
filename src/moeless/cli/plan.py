"""``moeless plan``: a placement from recorded loads, for this or another system."""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moeless.core.cluster import parse_bytes, parse_speeds
from moeless.core.whole_file import written_whole
from moeless.errors import ConfigError, os_reason

if TYPE_CHECKING:
    from moeless.bootstrap.placements.placement_plan import PlacementPlan, PlacementTask
    from moeless.costs.models import ModelShape
    from moeless.workloads.formats.expert_loads import Declared

_FIXED_SLOTS = ("sglang", "trtllm")


@click.command()
@click.argument("loads", type=click.Path(path_type=Path))
@click.option(
    "--devices", type=click.IntRange(1, 4096), default=8, show_default=True, help="Devices."
)
@click.option(
    "--slots",
    type=click.IntRange(min=1),
    help="Replicas of a layer on all devices together; default: twice the experts.",
)
@click.option(
    "--device-memory",
    metavar="SIZE",
    help="Instead of --slots: memory for experts on each device, such as 40GB.",
)
@click.option("--expert-bytes", metavar="SIZE", help="Size of one expert, such as 352MB.")
@click.option(
    "--model", help="A known model, such as mixtral-8x7b: its sizes, held against LOADS."
)
@click.option(
    "--policy",
    default="moeless",
    show_default=True,
    help="moeless, eplb, paper, static, swift, or an installed policy.",
)
@click.option(
    "--split",
    type=click.Choice(["even", "min-time"]),
    help="How the engine divides an expert's tokens over its replicas, for policy moeless: even "
    "(SGLang, vLLM, TensorRT-LLM) or min-time (MoEless); default: even, with --cost-model "
    "min-time.",
)
@click.option(
    "--cost-model",
    metavar="NAME|FILE",
    help="Balance time instead of tokens: paper, h200, a6000 or a JSON file (needs --model).",
)
@click.option(
    "--device-speeds",
    metavar="S,S,...",
    help="Relative speed of each device, such as 1,1,0.5,0.5: balance time instead of tokens.",
)
@click.option(
    "--current",
    type=click.Path(path_type=Path),
    help="The placement in force, any format that --output writes; default: static.",
)
@click.option(
    "--format",
    "format_name",
    help="Format of LOADS, as above; default: by content.",
)
@click.option("--experts", type=click.IntRange(1, 65536), help="Logical experts of the model.")
@click.option("--layers", type=click.IntRange(1, 4096), help="MoE layers of the model.")
@click.option("--allow-partial", is_flag=True, help="Accept loads of one rank's experts only.")
@click.option(
    "--output",
    type=click.Choice(["table", "json", "sglang", "trtllm"]),
    default="table",
    show_default=True,
    help="What to write.",
)
@click.option(
    "-o", "--output-file", type=click.Path(path_type=Path), help="Where to; default: stdout."
)
@click.option("--explain", is_flag=True, help="Say for every expert why it has its replicas.")
@click.option("--layer", type=click.IntRange(min=0), help="Show this layer only (absolute index).")
def plan(loads: Path, output: str, output_file: Path | None, **options: Any) -> None:
    """Plan which devices hold which experts, from the recorded LOADS of a model.

    LOADS is a file, or "-" for standard input; .gz, .bz2 and .xz are read, too. Its format is
    told from its content:

    \b
      trace         a routing trace of MoEless (moeless record)
      sglang        SGLang's recorder, mode stat: .pt or JSON with logical_count
      trtllm        the directory of TensorRT-LLM's expert statistics
      vllm          vLLM's routed experts: ids [tokens, layers, top_k], .npy or .npz
      vllm-stats    vLLM's EPLB load statistics: JSON lines with expert_load and p2l_map
      moe-infinity  MoE-Infinity's trace: counts [sequences, layers, experts], .npy
      array         a bare matrix [layers, experts]: .npy, .pt or JSON
      csv           text, a row per layer and a column per logical expert

    A CSV header may name a column of layers (layer, layer_id), experts (e0, expert_1, 2) and a
    total. What nothing names and what is hardly a load (ids, times, totals, tables one after the
    other) is refused.

    \b
    Examples:
      moeless plan loads.csv --devices 8 --slots 16
      moeless plan - --devices 8 < loads.csv
      moeless plan trace.npz --model mixtral-8x7b --device-memory 40GB --explain --layer 3
      moeless plan recorder.pt --devices 32 --slots 288 --output sglang -o map.json
      moeless plan expert_statistic/ --devices 36 --slots 288 --output trtllm -o eplb.yaml
    """
    explain, only = options.pop("explain"), options.pop("layer")
    if (explain or only is not None) and output in _FIXED_SLOTS:
        raise ConfigError(f"--explain and --layer go with --output table or json, not {output}")
    if options["slots"] is not None and options["device_memory"] is not None:
        raise ConfigError("--slots and --device-memory say the same thing; give one of them")
    if output_file is not None and os.path.realpath(output_file) == os.path.realpath(loads):
        raise ConfigError(f"-o {output_file} would overwrite the loads; name another file")
    task = _read_task(loads, equal_slots=output in _FIXED_SLOTS, **options)
    from moeless.bootstrap.placements.placement import plan_placement

    planned = plan_placement(task)
    text = _format(planned, output, explain=explain, only=only)
    if output_file is None:
        click.echo(text, nl=False)
        return
    _write(text, output_file)
    click.echo(f"moeless: wrote {output_file} ({_summary(planned)})", err=True)


def _read_task(loads: Path, *, equal_slots: bool, **options: Any) -> "PlacementTask":
    """Everything that the options say, with the files read."""
    memory, size = options["device_memory"], options["expert_bytes"]
    memory_bytes = None if memory is None else parse_bytes(memory, option="--device-memory")
    expert_bytes = None if size is None else parse_bytes(size, option="--expert-bytes")
    from moeless.bootstrap.placements.placement_plan import TOKENS_ONLY, PlacementTask
    from moeless.bootstrap.placements.torch_file import load_torch_file
    from moeless.workloads.formats.placements.read import read_any_placement
    from moeless.workloads.formats.read import read_loads

    model = _known_model(options["model"])
    if expert_bytes is None and model is not None:
        expert_bytes = model.expert.num_bytes
    cost = TOKENS_ONLY
    if options["cost_model"] is not None:
        cost = _cost(options["cost_model"], model, options["devices"])
    if options["device_speeds"] is not None:
        cost = replace(cost, speeds=parse_speeds(options["device_speeds"], options["devices"]))
    return PlacementTask(
        loads=read_loads(
            loads,
            load_torch=load_torch_file,
            format_name=options["format_name"],
            declared=_declared(options["experts"], options["layers"], model),
            allow_partial=options["allow_partial"],
        ),
        num_devices=options["devices"],
        policy=_planner(options),
        slots=options["slots"],
        device_memory_bytes=memory_bytes,
        expert_bytes=expert_bytes,
        current=read_any_placement(options["current"], num_devices=options["devices"])
        if options["current"]
        else None,
        cost=cost,
        equal_slots=equal_slots,
    )


def _planner(options: dict[str, Any]) -> str:
    """The planner: the policy's own, or the one for an even split."""
    split = options["split"] or ("min-time" if options["cost_model"] else "even")
    policy: str = options["policy"]
    if policy != "moeless":
        if options["split"] is not None:
            raise ConfigError(f"--split goes with --policy moeless, not with {policy}")
        return policy
    return "even_split" if split == "even" else policy


def _known_model(name: str | None) -> "ModelShape | None":
    if name is None:
        return None
    from moeless.costs.models import KNOWN_MODELS, known_model

    model = known_model(name)
    if model is None:
        known = ", ".join(sorted(shape.name for shape in KNOWN_MODELS))
        raise ConfigError(
            f"--model {name!r} is not known; known are {known} (or give --expert-bytes, "
            f"--experts and --layers)"
        )
    return model


def _cost(name: str, model: "ModelShape | None", devices: int) -> Any:
    if model is None:
        raise ConfigError("--cost-model needs the shape of an expert; give --model")
    from moeless.costs.time_models import build_time_model

    return build_time_model(name, model.expert, devices).cost


def _declared(experts: int | None, layers: int | None, model: "ModelShape | None") -> "Declared":
    from moeless.workloads.formats.expert_loads import Declared

    if model is None:
        return Declared(
            num_experts=experts, num_layers=layers, origin="the model (--experts, --layers)"
        )
    return Declared(
        num_experts=experts or model.num_experts,
        num_layers=layers or model.num_layers,
        origin=model.name,
    )


def _format(planned: "PlacementPlan", output: str, *, explain: bool, only: int | None) -> str:
    known = [layer.layer_id for layer in planned.layers]
    if only is not None and only not in known:
        raise ConfigError(
            f"--layer {only} is not in the loads; they have {known[0]} to {known[-1]}"
        )
    if output == "sglang":
        from moeless.workloads.formats.placements.sglang_map import format_sglang_map

        return format_sglang_map(planned.placement)
    if output == "trtllm":
        from moeless.workloads.formats.placements.trtllm_yaml import format_trtllm_yaml

        return format_trtllm_yaml(planned.placement)
    if output == "json":
        from moeless.cli.plan_report import report_json

        return report_json(planned, explain=explain, only=only)
    from moeless.cli.plan_report import report_table

    return report_table(planned, explain=explain, only=only)


def _summary(planned: "PlacementPlan") -> str:
    replicas = int(planned.placement.replicas_LED.sum())
    return f"{len(planned.layers)} layers, {replicas} replicas, {planned.copies} of them to copy"


def _write(text: str, path: Path) -> None:
    """Write all or nothing."""
    try:
        with written_whole(path) as part:
            part.write_text(text, "utf8")
    except OSError as error:
        raise ConfigError(f"-o {path}: cannot be written ({os_reason(error)})") from error
