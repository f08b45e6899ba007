"""Places replicas for engines that divide an expert's tokens evenly over its replicas.

There the load of a device is a sum of equal shares, so counts and seats must fit exactly. Local
search from a given set: the fullest device is relieved by adding, moving, replacing or exchanging
one replica, whatever lowers the highest load most, until nothing does.
"""

import numpy as np

from moeless.policies.kernels.compiled import compiled

_EPSILON = 1e-9


@compiled("void(float64[::1], uint8[:, ::1], float64[::1], float64[::1], int64[::1])")
def even_loads(load_E, replicas_ED, speed_D, device_load_D, copies_E):
    """Loads of the devices under an even split, over their speed; replicas of each expert.

    Args:
        load_E: Tokens per expert, float64 [E].
        replicas_ED: The set, uint8 [E, D].
        speed_D: Relative speed of each device, float64 [D].
        device_load_D: Result, float64 [D].
        copies_E: Result, int64 [E].
    """
    experts, devices = replicas_ED.shape
    device_load_D[:] = 0.0
    for e in range(experts):
        copies = np.int64(0)
        for d in range(devices):
            copies += replicas_ED[e, d]
        copies_E[e] = copies
        if copies > 0:
            for d in range(devices):
                if replicas_ED[e, d] != 0:
                    device_load_D[d] += load_E[e] / copies / speed_D[d]


@compiled("void(float64[::1], uint8[:, ::1], float64[::1], int64, int64, int64, float64[::1])")
def _with_copies(load_E, replicas_ED, speed_D, expert, before, after, device_load_D):
    """Change the shares of an expert's present replicas to those of another count."""
    change = load_E[expert] / after - load_E[expert] / before
    for d in range(len(device_load_D)):
        if replicas_ED[expert, d] != 0:
            device_load_D[d] += change / speed_D[d]


@compiled("boolean(float64, float64, float64, float64)")
def _better(highest, squares, best_highest, best_squares):
    if highest < best_highest * (1.0 - _EPSILON):
        return True
    return highest <= best_highest * (1.0 + _EPSILON) and squares < best_squares * (1.0 - 1e-7)


@compiled("float64(float64[::1], uint8[:, ::1], float64[::1], int64[::1], int64)")
def relieve_even(load_E, replicas_ED, speed_D, capacity_D, max_replicas):
    """Improve a set in place until no single change lowers the highest load.

    Args:
        load_E: Tokens per expert, float64 [E].
        replicas_ED: The set, uint8 [E, D]; every expert has a replica.
        speed_D: Relative speed of each device, float64 [D].
        capacity_D: Replicas that each device may hold, int64 [D].
        max_replicas: Replicas in all.

    Returns:
        The highest device load, over the device's speed.
    """
    experts, devices = replicas_ED.shape
    now_D = np.empty(devices)
    trial_D = np.empty(devices)
    copies_E = np.empty(experts, np.int64)
    held_D = np.zeros(devices, np.int64)
    nobody = np.int64(-1)
    total = np.int64(0)
    for e in range(experts):
        for d in range(devices):
            held_D[d] += replicas_ED[e, d]
            total += replicas_ED[e, d]
    for _ in range(20 * experts + 200):
        even_loads(load_E, replicas_ED, speed_D, now_D, copies_E)
        fullest = np.argmax(now_D)
        best = now_D[fullest]
        best_squares = (now_D * now_D).sum()
        drop_e = drop_d = add_e = add_d = other_e = nobody
        for e in range(experts):
            if replicas_ED[e, fullest] == 0 or load_E[e] == 0.0:
                continue
            share = load_E[e] / copies_E[e]
            for v in range(devices):
                if replicas_ED[e, v] != 0:
                    continue
                if held_D[v] < capacity_D[v]:
                    # Move it.
                    trial_D[:] = now_D
                    trial_D[fullest] -= share / speed_D[fullest]
                    trial_D[v] += share / speed_D[v]
                    highest, squares = trial_D.max(), (trial_D * trial_D).sum()
                    if _better(highest, squares, best, best_squares):
                        best, best_squares = highest, squares
                        drop_e, drop_d, add_e, add_d, other_e = e, fullest, e, v, nobody
                    if total < max_replicas:
                        # Add one.
                        trial_D[:] = now_D
                        _with_copies(
                            load_E, replicas_ED, speed_D, e, copies_E[e], copies_E[e] + 1, trial_D
                        )
                        trial_D[v] += load_E[e] / (copies_E[e] + 1) / speed_D[v]
                        highest, squares = trial_D.max(), (trial_D * trial_D).sum()
                        if _better(highest, squares, best, best_squares):
                            best, best_squares = highest, squares
                            drop_e, drop_d, add_e, add_d, other_e = nobody, nobody, e, v, nobody
                for f in range(experts):
                    if f == e or replicas_ED[f, v] == 0:
                        continue
                    if copies_E[f] > 1:
                        # Replace one of another expert here by one more of this.
                        trial_D[:] = now_D
                        _with_copies(
                            load_E, replicas_ED, speed_D, f, copies_E[f], copies_E[f] - 1, trial_D
                        )
                        trial_D[v] -= load_E[f] / (copies_E[f] - 1) / speed_D[v]
                        _with_copies(
                            load_E, replicas_ED, speed_D, e, copies_E[e], copies_E[e] + 1, trial_D
                        )
                        trial_D[v] += load_E[e] / (copies_E[e] + 1) / speed_D[v]
                        highest, squares = trial_D.max(), (trial_D * trial_D).sum()
                        if _better(highest, squares, best, best_squares):
                            best, best_squares = highest, squares
                            drop_e, drop_d, add_e, add_d, other_e = f, v, e, v, nobody
                    if replicas_ED[f, fullest] == 0:
                        # Exchange the two.
                        gain = share - load_E[f] / copies_E[f]
                        trial_D[:] = now_D
                        trial_D[fullest] -= gain / speed_D[fullest]
                        trial_D[v] += gain / speed_D[v]
                        highest, squares = trial_D.max(), (trial_D * trial_D).sum()
                        if _better(highest, squares, best, best_squares):
                            best, best_squares = highest, squares
                            drop_e, drop_d, add_e, add_d, other_e = e, fullest, e, v, f
        if add_e < 0:
            break
        if drop_e >= 0:
            replicas_ED[drop_e, drop_d] = 0
            held_D[drop_d] -= 1
            total -= 1
        replicas_ED[add_e, add_d] = 1
        held_D[add_d] += 1
        total += 1
        if other_e >= 0:
            replicas_ED[other_e, add_d] = 0
            replicas_ED[other_e, fullest] = 1
            held_D[add_d] -= 1
            held_D[fullest] += 1
    even_loads(load_E, replicas_ED, speed_D, now_D, copies_E)
    return now_D.max()
