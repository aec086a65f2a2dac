"""How much memory of a GPU could still be allocated.

Owns: the question to the driver and to torch. Must not know: what the memory is for.
"""

import torch


def free_bytes(device: torch.device) -> int | None:
    """What the driver has, and what torch keeps to give again; None for what is no GPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
