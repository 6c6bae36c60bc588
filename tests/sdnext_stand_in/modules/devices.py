import torch

device = cpu = torch.device("cpu")
dtype = torch.float32


def torch_gc(force=False, fast=False, reason=None): ...
