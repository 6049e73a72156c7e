"""The private parts of libraries that we use: the checklist of an upgrade. docs/support.md says what was tested."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = [
    path
    for folder in ("lit_fsdp", "tasks", "callbacks")
    for path in (ROOT / folder).rglob("*.py")  # the links inside lit_fsdp are not followed
]

# Public by name, but moved or changed between minor releases all the same.
DEEP = ("transformers.models.", "transformers.core_model_loading", "transformers.conversion_mapping", "peft.tuners.")
IMPORTS = {
    "jsonargparse": {
        "jsonargparse._completions_jsonschema.ParserJsonschema",
        "jsonargparse._typehints.get_all_subclass_paths",
    },
    "lightning": {
        "lightning.fabric.strategies.launchers.subprocess_script._ChildProcessObserver",
        "lightning.fabric.utilities.distributed._destroy_dist_connection",
        "lightning.fabric.utilities.distributed._init_dist_connection",
        "lightning.fabric.utilities.distributed._set_num_threads_if_needed",
        "lightning.pytorch.cli._InstantiatorFn",
        "lightning.pytorch.core.optimizer._MockOptimizer",
        "lightning.pytorch.strategies.launchers.multiprocessing._MultiProcessingLauncher",
        "lightning.pytorch.strategies.launchers.multiprocessing._WorkerOutput",
        "lightning.pytorch.strategies.launchers.subprocess_script._SubprocessScriptLauncher",
    },
    "peft": {
        "peft.tuners.lora.LoraLayer",
        "peft.tuners.lora.layer.Linear",
        "peft.tuners.lora.layer.ParamWrapper",
        "peft.tuners.tuners_utils._check_lora_target_modules_mamba",
    },
    "safetensors": {
        "safetensors.torch._TYPES",
    },
    "torch": {
        "torch._C._distributed_c10d",
        "torch._C._distributed_c10d._create_work_from_future",
        "torch._dynamo.callback.callback_handler",
        "torch._subclasses.fake_tensor.FakeTensor",
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "torch.distributed._functional_collectives",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.distributed.distributed_c10d._get_default_store",
        "torch.distributed.distributed_c10d._resolve_process_group",
        "torch.distributed.fsdp._common_utils.collect_grad_tensors",
        "torch.distributed.fsdp._fully_shard._fsdp_api.AllGather",
        "torch.distributed.fsdp._fully_shard._fsdp_api.ReduceScatter",
        "torch.distributed.fsdp._fully_shard._fsdp_common.DDPMeshInfo",
        "torch.distributed.fsdp._fully_shard._fsdp_common.TrainingState",
        "torch.distributed.fsdp._fully_shard._fsdp_common._from_local_no_grad",
        "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam",
        "torch.distributed.fsdp._fully_shard._fsdp_param.ShardedState",
        "torch.distributed.fsdp._fully_shard._fsdp_param_group",
        "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup",
        "torch.distributed.fsdp._fully_shard._fully_shard",
        "torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
        "torch.nn.modules.batchnorm._BatchNorm",
        "torch.nn.modules.batchnorm._NormBase",
        "torch.nn.modules.conv._ConvNd",
        "torch.testing._internal.distributed.fake_pg.FakeStore",
        "torch.utils._python_dispatch.TorchDispatchMode",
        "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
        "torch.utils._pytree.tree_flatten_with_path",
        "torch.utils._pytree.tree_iter",
        "torch.utils._pytree.tree_leaves",
        "torch.utils._pytree.tree_map",
        "torch.utils._pytree.tree_map_only",
        "torch.utils._pytree.tree_unflatten",
    },
    "transformers": {
        "transformers.conversion_mapping.get_model_conversion_mapping",
        "transformers.core_model_loading.Chunk",
        "transformers.core_model_loading.Concatenate",
        "transformers.core_model_loading.ConversionOps",
        "transformers.core_model_loading.Interleave",
        "transformers.core_model_loading.MergeModulelist",
        "transformers.core_model_loading.Transpose",
        "transformers.core_model_loading.WeightConverter",
        "transformers.core_model_loading.WeightRenaming",
        "transformers.core_model_loading.apply_converters",
        "transformers.core_model_loading.dot_natural_key",
        "transformers.core_model_loading.rename_source_key",
        "transformers.core_model_loading.revert_weight_conversion",
        "transformers.models.mimi.modeling_mimi.MimiConv1d",
        "transformers.models.mimi.modeling_mimi.MimiEncoder",
        "transformers.models.mimi.modeling_mimi.MimiSplitResidualVectorQuantizer",
        "transformers.models.mimi.modeling_mimi.MimiTransformerModel",
        "transformers.models.qwen2_5_omni.modeling_qwen2_5_omni.ECAPA_TimeDelayNet",
        *(
            f"transformers.models.qwen3.modeling_qwen3.Qwen3{name}"
            for name in ("Attention", "DecoderLayer", "MLP", "RMSNorm")
        ),
        "transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe.Qwen3OmniMoeCode2WavConfig",
        "transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe",
        "transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe.Qwen3OmniMoeCausalConvNet",
        "transformers.models.whisper.tokenization_whisper.LANGUAGES",
        "transformers.models.whisper.tokenization_whisper.TO_LANGUAGE_CODE",
    },
}
ATTRIBUTES = {
    "jsonargparse": {"_actions", "_subcommand_parsers", "_typehint"},
    "lightning": {
        "_attr_name",
        "_update_attr",
        *(
            "_after_closure",
            "_wrap_closure",
            "_broadcast_sigterm_tensor",
            "_call_children_scripts",
            "_checkpoint_connector",
            "_checkpoint_io",
            "_child_processes",
        ),
        *(
            "_combined_loader",
            "_combined_loader_states_to_load",
            "_current_fx_name",
            "_data_fetcher",
            "_defer_save_until_validation",
        ),
        *("_callback_metrics", "_num_ready_batches_reached", "_restarting"),
        *("_batches_that_stepped", "_device_mesh", "_evaluation_loop", "_monitor_candidates"),
        *("_last_checkpoint_saved", "_save_checkpoint", "_save_last_checkpoint", "_save_topk_checkpoint"),
        *("_get_metric_interpolated_filepath_name", "_hpc_resume_path", "_should_save_on_exception"),
        *(
            "_last_global_step_saved",
            "_layer_sync",
            "_link_checkpoint",
            "_log_graph",
            "_logger_connector",
            "_on_before_fetch",
        ),
        *("_init_deepspeed_distributed", "_tensor_parallel_size"),
        *("_backward_fn", "_make_closure", "_step_fn", "_training_step", "_zero_grad_fn"),
        *("_optimizer", "_reset_optimizers_and_schedulers", "_results", "_run_early_stopping_check"),
        *("_should_accumulate", "_signal_connector"),
    },
    "peft": {"_disable_adapters"},
    "python": {"_action_groups", "_current_frames", "_exit", "_getframe", "_optionals"},
    "ray": {"_filesystem"},
    "torch: FSDP2": {
        *(
            "_all_gather_comm",
            "_all_reduce_hook",
            "_all_reduce_process_group",
            "_comm_ctx",
            "_device_handle",
            "_end_backward_iteration",
        ),
        *("_fsdp_param_groups", "_get_fsdp_state", "_orig_cls_mro_index", "_reduce_scatter_comm", "_unsharded_param"),
        *("_all_gather_result", "_module_fqn", "_modules_to_run_forward", "_root_post_backward_final_callback"),
        *("_get_post_forward_mesh_info",),
        *(
            "_is_root",
            "_lazy_init",
            "_module_info",
            "_register_post_backward_hook",
            "_sharded_param_data",
            "_state_ctx",
            "_training_state",
        ),
    },
    "torch: operators": {
        *("_amp_foreach_non_finite_check_and_unscale_", "_foreach_clamp_max_", "_foreach_clamp_min_", "_foreach_copy_"),
        *("_foreach_add_", "_foreach_lerp_", "_foreach_mul_", "_foreach_norm", "_c10d_functional"),
        *("_local_scalar_dense", "_unsafe_view"),
    },
    "torch: process groups": {"_dump_fr_trace_json", "_dump_nccl_trace_json", "_set_pg_timeout", "_world"},
    "torch: tensors, modules, autograd, allocator": {
        *(
            "_C",
            "_apply",
            "_autograd",
            "_backward_hooks",
            "_backward_pre_hooks",
            "_execution_engine",
            "_buffers",
            "_cdata",
            "_compiled_call_impl",
            "_current_graph_task_id",
            "_dynamo",
        ),
        *(
            "_dataset_fetcher",
            "_dump_snapshot",
            "_forward_hooks",
            "_forward_pre_hooks",
            "_get_iterator",
            "_is_functional_tensor",
            "_is_view",
            "_len_torch_dispatch_stack",
        ),
        *("_custom_op_handlers", "_functional_call", "_named_members", "_op_dispatcher", "_torchdynamo_orig_callable"),
        *("_local_tensor", "_optimizer_step_post_hooks", "_spec"),
        *("_modules", "_non_persistent_buffers_set", "_parameters", "_post_accumulate_grad_hooks"),
        *("_record_memory_history", "_top_saved_tensors_default_hooks", "_type", "_version"),
    },
    "torchmetrics": {"_computed", "_copy_state_dict", "_update_count"},
    "transformers": {
        *(
            "_attn_implementation",
            "_experts_implementation",
            "_keep_in_fp32_modules",
            "_model_mapping",
            "_no_split_modules",
            "_supports_attention_backend",
        ),
        *("_ignore_bidirectional_mask_sdpa", "_ignore_causal_mask_sdpa"),
        *("_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_save"),
    },
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def read_imports(tree: ast.AST) -> Iterator[str]:
    """Everything private or deep that is imported from a library, by its full name."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("lit_fsdp"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (name for name in names if name.startswith(DEEP) or any(map(is_private, name.split("."))))


def read_own_names(tree: ast.AST) -> Iterator[str]:
    """What our classes and modules define themselves."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            yield node.attr


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def read_attributes(tree: ast.AST) -> Iterator[str]:
    """All private attributes, also those named by a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith(("attr", "Method")):
            name = node.args[1] if len(node.args) > 1 else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str) and is_private(name.value):
                yield name.value


@pytest.mark.full
def test_every_private_part_of_a_library_is_on_the_list() -> None:
    trees = [ast.parse(path.read_text()) for path in SOURCES]
    imports = {name for tree in trees for name in read_imports(tree)}
    assert imports == set().union(*IMPORTS.values())
    own = {name for tree in trees for name in read_own_names(tree)}
    attributes = {name for tree in trees for name in read_attributes(tree)} - own
    assert attributes == set().union(*ATTRIBUTES.values()) - own


@pytest.mark.parametrize("name", sorted(set().union(*IMPORTS.values())))
def test_what_is_imported_is_there(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert hasattr(importlib.import_module(module), attribute)
