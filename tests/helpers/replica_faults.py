"""Actions of single ranks on their replica in a scene."""

import copy

import torch
from torch import nn

from tests.helpers.replica_scenes import Scene, flip, training_net

WEIGHT = "2.weight"


def flip_weight(scene: Scene, name: str = WEIGHT, place: tuple[int, ...] = (1, 2), bit: int = 22) -> None:
    flip(scene.module.get_parameter(name), place, bit)


def flip_gradient(scene: Scene) -> None:
    flip(scene.module[2].weight.grad, (3, 0), 20)


def poke_buffer(scene: Scene) -> None:
    scene.module.get_buffer("table")[2] += 0.5


def flip_momentum(scene: Scene) -> None:
    flip(scene.optimizer.state[scene.module[2].weight]["momentum_buffer"], (0, 3), 21)


def lose_momentum(scene: Scene) -> None:
    scene.optimizer.state.clear()


def leave_out(scene: Scene, name: str = WEIGHT) -> None:
    (group,) = scene.optimizer.param_groups
    weight = scene.module.get_parameter(name)
    group["params"] = [parameter for parameter in group["params"] if parameter is not weight]


def replace_weight(scene: Scene) -> None:
    scene.module[2].weight = nn.Parameter(scene.module[2].weight.detach().clone())


def optimize_a_copy(scene: Scene) -> None:
    scene.optimizer = torch.optim.SGD(copy.deepcopy(scene.module).parameters(), lr=0.125)


def set_group(scene: Scene, key: str, factor: float) -> None:
    scene.optimizer.param_groups[0][key] *= factor


def clip(scene: Scene) -> None:
    nn.utils.clip_grad_norm_(scene.module.parameters(), 0.01)


def drop_gradients(scene: Scene) -> None:
    scene.optimizer.zero_grad()


def edit_gradient(scene: Scene) -> None:
    scene.module[2].weight.grad[0, 0] += 1.0


def other_steps(scene: Scene, steps: int) -> None:
    scene.steps = steps


def load_another_seed(scene: Scene) -> None:
    scene.module.load_state_dict(training_net(seed=2).state_dict())


def another_weight(scene: Scene) -> None:
    with torch.no_grad():
        scene.module[2].weight.fill_(0.5)


def other_data(scene: Scene) -> None:
    scene.data = scene.data * 3 + 1


def swap_layers(scene: Scene) -> None:
    scene.module[0], scene.module[2] = scene.module[2], scene.module[0]


def round_parameters(scene: Scene) -> None:
    with torch.no_grad():
        for parameter in scene.module.parameters():
            parameter.copy_(parameter.bfloat16())


def scale_gradients(scene: Scene) -> None:
    for parameter in scene.module.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(1024.0)


def fill_with_nan(scene: Scene) -> None:
    with torch.no_grad():
        scene.module[2].weight[0, 0] = float("nan")
