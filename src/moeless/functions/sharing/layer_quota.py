"""How much of each device one layer of a model may take. Pure."""

from moeless.core.plan import CountArray


def layer_quota_D(slots_D: CountArray, *, num_layers: int, num_experts: int) -> CountArray:
    """Replicas of one layer that each device may hold, int64 [D].

    Where all layers fit side by side every layer gets an equal share of each device. Where they do
    not, layers take turns: a layer may take half of a device while the next one is loaded into the
    other half, or all of it if half would not hold its experts.

    Args:
        slots_D: Instances that the model may hold on each device, 0 where it may hold none [D].
        num_layers: L.
        num_experts: E.
    """
    share_D: CountArray = slots_D // num_layers
    if share_D.sum() >= num_experts:
        return share_D
    half_D: CountArray = slots_D // 2
    return half_D if half_D.sum() >= num_experts else slots_D
