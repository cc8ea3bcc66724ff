"""Processes: start, models as copies or under FSDP2, stop."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, parse_flag_from_env
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import nn

from machinery.cli import InputError, say
from machinery.models import store_as_cast

JOIN_LIMIT = timedelta(minutes=5)  # for all processes to start


def start(args: Any) -> Accelerator:
    """This process's accelerator. Raises `InputError` for what would change the mathematics."""
    check_environment()
    transformers.logging.set_verbosity_error()
    # On a Mac the CPU: its GPU has no float64, which random numbers and sums need.
    has_mps = torch.backends.mps.is_available()
    group_limit = InitProcessGroupKwargs(timeout=JOIN_LIMIT)
    accelerator = Accelerator(cpu=has_mps, kwargs_handlers=[group_limit])
    if dist.is_initialized():
        accelerator.wait_for_everyone()  # NCCL connects at the first collective
        group: Any = dist.group.WORLD
        group.set_timeout(timedelta(days=1))  # a collective may wait for a slow reward
    check_launch(accelerator)
    if accelerator.device.type == "cuda":  # launchers set 1, but models are checked on the CPU
        torch.set_num_threads(count_cpus())
    elif "OMP_NUM_THREADS" not in os.environ:  # torch does not know of quotas
        torch.set_num_threads(min(count_cpus(), torch.get_num_threads()))
    if accelerator.is_fsdp2:
        plugin = accelerator.state.fsdp_plugin
        plugin.mixed_precision_policy = None  # fp32 weights under autocast, as in copies
        plugin.cpu_ram_efficient_loading = False  # else the others get empty models
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    # Under bf16 the fp32 products, such as the vocabulary head, may use TF32.
    bf16 = accelerator.mixed_precision == "bf16"
    torch.set_float32_matmul_precision("high" if bf16 and args.tf32 else "highest")
    # cuDNN's attention plans again for each shape, and unpadded batches are of new shapes all the
    # time. It also had NaN gradients for some masks (pytorch#196678).
    torch.backends.cuda.enable_cudnn_sdp(False)
    precision = "bf16" if bf16 else "fp32 (on GPUs, bf16 is faster)"
    say(f"{accelerator.device}, {precision}, processes: {accelerator.num_processes}")
    return accelerator


def check_environment() -> None:
    """Raise `InputError` for other engines, which a launcher's file may choose."""
    if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        raise InputError("DeepSpeed takes a step in every backward pass; use configs/fsdp2.yaml")
    if parse_flag_from_env("ACCELERATE_USE_MEGATRON_LM"):
        raise InputError("ACCELERATE_USE_MEGATRON_LM: no Megatron-LM here; use configs/fsdp2.yaml")
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if backend.lower() != "no":
        raise InputError(f"ACCELERATE_DYNAMO_BACKEND={backend}: use no, or diffs/compile.diff")


def count_cpus() -> int:
    """This process's share of the CPUs, within its affinity and its container's quota."""
    cpus = os.cpu_count() or 1
    with suppress(OSError, ValueError):  # another system, no quota
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cpus = min(cpus, int(quota) // int(period))
    gpus = torch.cuda.device_count()
    share = cpus // int(os.environ.get("LOCAL_WORLD_SIZE", gpus or 1))
    if hasattr(os, "sched_getaffinity"):  # Slurm may give few
        share = min(share, len(os.sched_getaffinity(0)))
    return max(1, share)


def check_launch(accelerator: Accelerator) -> None:
    """Raise `InputError` for what a launcher or its file may set up wrongly."""
    is_on, started = parse_flag_from_env, accelerator.num_processes
    usable = torch.cuda.is_available() or is_on("ACCELERATE_USE_CPU")
    if [*Path("/dev").glob("nvidia[0-9]*")] and not usable:
        raise InputError(f"torch {torch.__version__} cannot use the GPU: see docs/running.md")
    if is_on("FSDP_ACTIVATION_CHECKPOINTING"):  # it renames weights
        raise InputError("use --gradient_checkpointing, not fsdp_activation_checkpointing")
    if (steps := accelerator.gradient_accumulation_steps) != 1:
        raise InputError(f"gradient_accumulation_steps={steps}: use --micro_batch_tokens instead")
    if (precision := accelerator.mixed_precision) not in ("no", "bf16"):
        raise InputError(f"mixed_precision={precision}: its scaler skips steps; use bf16")
    plan = accelerator.parallelism_config
    if plan and plan.non_data_parallel_size > 1:  # FSDP2 would average over some processes only
        raise InputError("tp_size, cp_size and sp_size have to be 1; use configs/fsdp2.yaml")
    # Launchers of several processes set WORLD_SIZE, or, as accelerate's, MASTER_ADDR:
    several = {"MASTER_ADDR", "ACCELERATE_DYNAMO_BACKEND"} <= os.environ.keys()
    wanted = int(os.environ.get("WORLD_SIZE", 1 + several))
    if started != wanted:
        raise InputError(f"only {started} of the launcher's processes started; see docs/running.md")
    if is_on("ACCELERATE_USE_FSDP") and not accelerator.is_fsdp2:
        raise InputError("FSDP2 did not start: it needs GPUs and --fsdp_version 2")


def place(accelerator: Accelerator, model: nn.Module, optimizer: Any = None) -> Any:
    """Move a model to this process's device, in the run's precision: a copy, or FSDP2's shard.

    Shards get the weights of the first process.
    """
    if accelerator.mixed_precision == "bf16":
        store_as_cast(model)  # frozen layers, such as those under adapters
        model.forward = accelerator.autocast()(model.forward)
    if not accelerator.is_fsdp2:
        return model.to(accelerator.device)
    from torch.distributed.checkpoint import state_dict as dcp  # slow to import

    transformer: Any = getattr(model, "lm", None) or getattr(model, "backbone", model)
    kinds = {type(module).__name__ for module in model.modules()}  # a text model has no vision's
    plugin = accelerator.state.fsdp_plugin  # shards each transformer block by itself
    plugin.transformer_cls_names_to_wrap = sorted(kinds.intersection(transformer._no_split_modules))
    weights = model.state_dict() if accelerator.is_main_process else {}
    root: Any = model  # it and the optimizer's weights become shards in place
    if optimizer:
        accelerator.prepare(root, optimizer)
    else:
        fsdp2_prepare_model(accelerator, root)
    options: Any = dict(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    dcp.set_model_state_dict(root, weights, options=dcp.StateDictOptions(**options))
    root.set_reshard_after_forward(True)  # by default, the root keeps its weights
    root._get_fsdp_state()._lazy_init()  # for `inference` before the first forward pass
    return root


def prepare(accelerator: Accelerator, model: nn.Module, optimizer: Any, args: Any) -> tuple:
    """`place` a model to train. A step with gradients that are not finite raises `InputError`."""
    optimizer.register_step_pre_hook(check_gradients)
    for module in model.modules():
        if args.gradient_checkpointing and isinstance(module, transformers.PreTrainedModel):
            module.gradient_checkpointing_enable({"use_reentrant": False})
    model = place(accelerator, model.train(), optimizer)
    if accelerator.num_processes > 1 and not accelerator.is_fsdp2:
        for x in [*model.parameters(), *model.buffers()]:  # equal copies, also of a new head
            dist.broadcast(x.detach(), src=0)
    return model, optimizer


def freeze(accelerator: Accelerator, model: nn.Module) -> Any:
    """Move a model to this process's device in the run's precision, without gradients."""
    return place(accelerator, model.eval().requires_grad_(False))


def own_rows(accelerator: Accelerator, size: int) -> slice:
    """This process's part of `size` rows; all of them if the parts would not be equal."""
    part, rest = divmod(size, accelerator.num_processes)
    first = part * accelerator.process_index
    return slice(None) if rest else slice(first, first + part)


def check_gradients(optimizer: Any, args: Any, kwargs: Any) -> None:
    """A hook before each step: stop if the gradient is not finite."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    total = nn.utils.get_total_norm([grad for grad in gradients if grad is not None])
    norm = full_tensor(total).item()
    if not math.isfinite(norm):
        why = f"the norm of the gradient is {norm}; the step was not taken"
        raise InputError(f"{why}. A lower --lr or fp32 instead of bf16 may help")


@contextmanager
def inference(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """Evaluation mode, in the run's precision, without gradients."""
    training = model.training
    model.eval()
    # Under FSDP2, gather all weights: the `lm` in a policy can be called by itself.
    shards: list[Any] = [module for module in model.modules() if hasattr(module, "unshard")]
    for module in shards:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    with torch.no_grad(), accelerator.autocast():
        yield
    for module in shards:
        module.set_reshard_after_forward(True, recurse=False)
        module.reshard()
    model.train(training)


def full_tensor(x: torch.Tensor) -> torch.Tensor:
    """A tensor without FSDP2's sharding. All processes have to call this."""
    x = x.detach()
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def stop(accelerator: Accelerator) -> None:
    """Leave the process group together: gloo sometimes aborts if a process leaves first."""
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()
