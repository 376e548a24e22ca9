"""What arguments and attributes are called in other libraries, and what they are called here, for
errors.

Each text is a clause that goes on after "got an unexpected keyword argument 'max_epochs': ". In
those of a training `{step}` stands for the class or function with the options of a step: Trainer,
TrainStep or prepare.
"""

from __future__ import annotations

from collections.abc import Mapping

_EPOCHS = "the number of epochs is fit(..., epochs=) of a Trainer"
_STEPS = "the number of steps is fit(..., max_steps=) of a Trainer"
_TRAIN_DATA = "the training data is the first argument of a Trainer's fit"
_VALIDATION_DATA = "the validation data is fit(..., validate=) of a Trainer"
_VALIDATE_EVERY = (
    "the number of steps between validations is fit(..., validate_every=) of a Trainer"
)
_RESUME = "the run or checkpoint to resume from is fit(..., resume=) of a Trainer"
_RUN_DIR = "the folder of a run's files is Trainer(..., run_dir=)"
_GLOBAL_BATCH = "a step has the samples of Trainer(..., global_batch_size=), over all workers"
_WORKERS = (
    "the number of workers is that of the launcher: lockstep run -np N, or lockstep.launch(fn, "
    "workers=N)"
)
_HOSTS = "the hosts are those of the launcher: lockstep run -H a:4,b:4"
_DEVICE = "the device is chosen before by lockstep.init(device), by itself where there is a GPU"
_PRECISION = '16-bit numbers are {step}(..., precision="bf16")'
_FP16 = 'fp16 is TrainStep\'s or Trainer(..., precision="fp16"); prepare has precision="bf16"'
_CLIP = "the maximum norm of the gradient is {step}(..., max_grad_norm=)"
_ACCUMULATE = (
    "it is gradient_accumulation_steps= of a Trainer or TrainStep, which divides a worker's part "
    "of the global batch; a loop of your own steps after every Nth batch"
)
_COMPILE = (
    "lockstep.prepare_model(model, comm, compile_model=True) compiles the model, before the "
    "optimizer is made"
)
_SYNC_BATCHNORM = (
    "it is sync_batchnorm= of a Trainer or TrainStep; in a loop of your own, "
    "lockstep.prepare_model(model, comm, sync_batchnorm=True) converts the model before"
)
_OPTIMIZER = (
    "it belongs to the optimizer, an argument that you make: "
    "torch.optim.AdamW(model.parameters(), lr=1e-3)"
)
_SCHEDULER = (
    "the learning rate follows scheduler=, one of torch.optim.lr_scheduler, or "
    "schedule=lockstep.make_schedule(...), of a Trainer or TrainStep"
)
_LOSS = "the loss is loss_fn=, a function (output, target) -> loss"
_METRICS = "the metrics are Trainer(..., metrics={{name: function}})"
_NUM_WORKERS = "the loader processes of each worker are Trainer(..., num_workers=)"
_LOADER = (
    "it belongs to a DataLoader or lockstep.Loader(...), which fit() and validate= take as data"
)
_COLLATE = f"the function that makes a batch is collate_fn=; {_LOADER}"
_LOGGER = (
    "loggers are callbacks: Trainer(..., callbacks=[..., lockstep.callbacks.TensorBoard()]), "
    "WandB() or MLflow()"
)
_PROGRESS = (
    "the progress is shown by the callback lockstep.callbacks.Progress(); callbacks=[] shows "
    "nothing"
)
_CHECKPOINTS = (
    "checkpoints are Trainer(..., run_dir=), at intervals of "
    'lockstep.callbacks.Checkpoints("500steps") in callbacks='
)
_KEEP = "the number of checkpoints to keep is Trainer(..., keep_checkpoints=)"
_BEST = (
    'the best checkpoint is kept by lockstep.callbacks.Checkpoints(best="val_loss") in callbacks='
)
_EARLY_STOPPING = (
    "it is the callback lockstep.callbacks.EarlyStopping(metric, patience=) in callbacks="
)
_AVERAGE = (
    "averages of weights are the callback lockstep.callbacks.AveragedWeights(...) in callbacks="
)
_PROFILE = (
    "the profiler is the callback lockstep.callbacks.Profile(steps=range(10, 13)) in callbacks="
)
_DETERMINISTIC = "equal bits at any number of workers are {step}(..., virtual_workers=8)"
_STRATEGY = (
    'the strategy is Trainer(..., strategy="distributed"), "sharded" (as FSDP and ZeRO) or '
    '"replicas"'
)
_SEED = "the seed is {step}(..., seed=), that of the order of samples and of dropout"
_MODEL = "the model is the first argument, of a Trainer or TrainStep"
_LIMIT = (
    "take a part of the data: torch.utils.data.Subset(dataset, range(n)); or fit(..., max_steps=)"
)
_CALLBACK = (
    "what a run does besides training is written as a callback, a lockstep.callbacks.Callback in "
    "callbacks="
)
_FORWARD = "how model and batch give output and target is Trainer(..., forward=)"
_ASYNC = "checkpoints are written in the background with Trainer(..., async_save=True)"
_NOT_NEEDED = (
    "it is not needed: the batches are divided among the workers by themselves, and every sample "
    "is used once"
)
_TIMEOUT = "how long a collective waits is lockstep.init(timeout=), or lockstep run --stall-timeout"
_IN_MODEL = "it belongs to the model, which you make"
_MODE = "a Trainer does what its methods are called for: fit, evaluate, predict"


def rows(text: str, names: str) -> dict[str, str]:
    """Return a row of a table for each of `names`, which are separated by blanks, with one text."""
    return dict.fromkeys(names.split(), text)


# Lightning's Trainer and fit; TrainingArguments and Trainer of Transformers; Accelerator and its
# plugins; Composer, Keras and Ignite where they have names of their own; and what loops of one's
# own call these things.
_TRAINING: dict[str, str] = {
    **rows(
        _EPOCHS,
        "max_epochs min_epochs num_train_epochs num_epochs n_epochs nb_epochs nepochs epoch "
        "max_duration",
    ),
    **rows(
        _STEPS,
        "steps num_steps max_iters max_iterations num_iterations total_steps num_training_steps "
        "min_steps",
    ),
    **rows(
        _TRAIN_DATA,
        "train train_dataset train_dataloader train_dataloaders train_loader train_data trainset",
    ),
    **rows(
        _TRAIN_DATA,
        "datamodule dataset dataloader dataloaders data train_set training_data train_ds",
    ),
    **rows(
        _VALIDATION_DATA,
        "eval_dataset val_dataset valid_dataset val_dataloader val_dataloaders eval_dataloader",
    ),
    **rows(
        _VALIDATION_DATA,
        "val_loader valid_loader test_loader eval_loader val_data valid_data validation_data",
    ),
    **rows(
        _VALIDATION_DATA,
        "test_dataset test_data valset testset validset eval_data val valid validation",
    ),
    **rows(
        _VALIDATE_EVERY,
        "val_check_interval eval_steps eval_interval eval_every val_every validation_freq",
    ),
    **rows(
        _VALIDATE_EVERY, "eval_strategy evaluation_strategy eval_freq val_interval validate_steps"
    ),
    **rows(
        "each epoch ends with a validation",
        "check_val_every_n_epoch eval_on_start eval_delay do_eval",
    ),
    **rows(
        _RESUME,
        "ckpt_path resume_from_checkpoint resume_from checkpoint load_path auto_resume "
        "load_checkpoint",
    ),
    **rows(
        _RUN_DIR,
        "default_root_dir output_dir project_dir save_dir save_folder checkpoint_dir ckpt_dir "
        "out_dir",
    ),
    **rows(
        _RUN_DIR,
        "log_dir logging_dir weights_save_path run_name root_dir logdir dirpath workdir work_dir",
    ),
    **rows(_RUN_DIR, "project_config overwrite_output_dir model_dir save_path exp_dir"),
    **rows(
        _GLOBAL_BATCH,
        "batch_size per_device_train_batch_size per_gpu_train_batch_size train_batch_size",
    ),
    **rows(
        _GLOBAL_BATCH,
        "per_device_eval_batch_size eval_batch_size micro_batch_size batch_size_per_device",
    ),
    **rows(
        _GLOBAL_BATCH,
        "device_train_microbatch_size split_batches global_batch_size auto_find_batch_size",
    ),
    **rows(
        _GLOBAL_BATCH, "auto_scale_batch_size effective_batch_size train_micro_batch_size_per_gpu"
    ),
    **rows(
        _WORKERS,
        "num_processes nproc nproc_per_node world_size num_gpus n_gpus ngpus n_gpu tpu_cores "
        "workers",
    ),
    **rows(_WORKERS, "tpu_num_cores auto_select_gpus num_devices n_workers"),
    **rows(_HOSTS, "num_nodes nnodes num_hosts num_machines hosts"),
    **rows(
        _DEVICE,
        "device accelerator use_cpu no_cuda cpu cuda use_cuda gpus gpu gpu_ids device_placement",
    ),
    **rows(_DEVICE, "local_rank rank backend ddp_backend use_mps_device device_type"),
    **rows(
        _PRECISION,
        "mixed_precision amp use_amp bf16 autocast amp_backend amp_level half_precision_backend "
        "dtype",
    ),
    **rows(_PRECISION, "bf16_full_eval fp16_full_eval half"),
    **rows(_FP16, "fp16 scaler grad_scaler fp16_opt_level loss_scale initial_scale_power"),
    "tf32": "torch.backends.cuda.matmul.allow_tf32 = True sets it",
    **rows(
        _CLIP,
        "gradient_clip_val gradient_clip_algorithm gradient_clipping grad_clip clip_grad "
        "clip_grad_norm",
    ),
    **rows(
        _CLIP,
        "clip_norm clipnorm max_norm grad_clip_norm gradient_clip grad_norm_clip clip_grad_value "
        "clipvalue",
    ),
    **rows(_CLIP, "global_clipnorm gradient_clip_norm clip"),
    "track_grad_norm": "the callback lockstep.callbacks.TensorBoard() writes the norm, with "
    "max_grad_norm= set",
    **rows(
        _ACCUMULATE,
        "accumulate_grad_batches grad_accum grad_accumulation_steps accumulation_steps accum_steps",
    ),
    **rows(
        _ACCUMULATE,
        "gradient_accumulation_plugin gradient_accumulation accumulate_steps grad_accum_steps",
    ),
    **rows(
        _COMPILE,
        "compile torch_compile torch_compile_backend torch_compile_mode compile_model use_compile",
    ),
    **rows(_COMPILE, "dynamo_backend dynamo_plugin torchdynamo jit_compile jit_mode_eval jit"),
    **rows(_SYNC_BATCHNORM, "sync_batchnorm sync_bn use_sync_bn"),
    "channels_last": "lockstep.prepare_model(model, comm, channels_last=True) converts the model "
    "before",
    **rows(
        _OPTIMIZER,
        "lr learning_rate weight_decay momentum betas adam_beta1 adam_beta2 adam_epsilon optim",
    ),
    **rows(_OPTIMIZER, "optim_args optim_target_modules optimizer_cls_and_kwargs eps adafactor"),
    **rows("the optimizer is the argument optimizer=, a single one", "optimizers opt optimiser"),
    **rows(
        _SCHEDULER,
        "lr_scheduler lr_schedulers schedulers lr_scheduler_type lr_scheduler_kwargs warmup_ratio",
    ),
    **rows(
        _SCHEDULER,
        "warmup_steps lr_schedule warmup_epochs warmup step_scheduler_with_optimizer lr_decay",
    ),
    "auto_lr_find": "the learning rate is that of the optimizer, which you make",
    **rows(_LOSS, "loss criterion loss_function compute_loss compute_loss_func loss_func"),
    "label_smoothing_factor": "it belongs to the loss: "
    "loss_fn=nn.CrossEntropyLoss(label_smoothing=)",
    **rows(
        _METRICS, "compute_metrics metric eval_metrics train_metrics preprocess_logits_for_metrics"
    ),
    **rows(_METRICS, "include_inputs_for_metrics batch_eval_metrics include_for_metrics"),
    **rows(_NUM_WORKERS, "dataloader_num_workers loader_workers num_loader_workers"),
    **rows(_COLLATE, "data_collator collator"),
    **rows(
        _LOADER,
        "dataloader_drop_last dataloader_pin_memory dataloader_persistent_workers generator",
    ),
    **rows(
        _LOADER,
        "dataloader_prefetch_factor dataloader_config pin_memory persistent_workers "
        "prefetch_factor",
    ),
    **rows(_LOADER, "sampler worker_init_fn multiprocessing_context"),
    **rows(
        "batches of samples of like length are lockstep.data.LengthBatchSampler, in a "
        "lockstep.Loader(...)",
        "group_by_length length_column_name train_sampling_strategy",
    ),
    **rows(
        _LOGGER,
        "logger loggers report_to log_with log_every_n_steps logging_steps logging_strategy "
        "tracker",
    ),
    **rows(
        _LOGGER,
        "logging_first_step log_interval log_every log_level enable_autolog_hparams wandb "
        "tensorboard",
    ),
    **rows(_LOGGER, "use_wandb logging_nan_inf_filter log_freq"),
    **rows(
        _PROGRESS,
        "enable_progress_bar progress_bar_refresh_rate progress_bar disable_tqdm verbose quiet",
    ),
    **rows(_PROGRESS, "enable_model_summary weights_summary show_progress"),
    **rows(
        _CHECKPOINTS,
        "enable_checkpointing checkpoint_callback save_steps save_strategy save_every "
        "save_interval",
    ),
    **rows(
        _CHECKPOINTS,
        "checkpoint_every save_every_n_epochs save_freq checkpoint_interval save_checkpoint",
    ),
    **rows(_KEEP, "save_total_limit save_top_k max_checkpoints total_limit"),
    **rows(
        _BEST,
        "load_best_model_at_end metric_for_best_model greater_is_better monitor save_best "
        "save_best_only",
    ),
    **rows(
        _EARLY_STOPPING,
        "early_stopping patience early_stop early_stopping_patience early_stop_callback",
    ),
    **rows(_AVERAGE, "stochastic_weight_avg ema swa ema_decay use_ema"),
    **rows(_PROFILE, "profiler profile barebones"),
    **rows(
        "tests with a few steps are fit(..., max_steps=3)",
        "fast_dev_run overfit_batches num_sanity_val_steps",
    ),
    **rows(_DETERMINISTIC, "deterministic full_determinism"),
    "benchmark": "torch.backends.cudnn.benchmark = True sets it",
    **rows("torch.autograd.set_detect_anomaly(True) sets it", "detect_anomaly debug"),
    **rows("a loss that is not finite ends the run by itself", "terminate_on_nan nan_check"),
    **rows(_STRATEGY, "fsdp fsdp_config fsdp_plugin fsdp_min_num_params deepspeed"),
    **rows(
        _STRATEGY, "deepspeed_plugin deepspeed_config megatron_lm_plugin ddp zero_stage plugins"
    ),
    **rows(_STRATEGY, "distributed_backend distributed parallel parallelism_config"),
    **rows(_SEED, "data_seed random_state random_seed manual_seed rng_types"),
    **rows(_MODEL, "net network module model_init lightning_module"),
    **rows(
        _LIMIT,
        "limit_train_batches limit_val_batches limit_test_batches limit_predict_batches "
        "steps_per_epoch",
    ),
    **rows(
        "Ctrl-C and SIGTERM end a run with a checkpoint; a limit of time is the scheduler's",
        "max_time",
    ),
    **rows(_CALLBACK, "algorithms hooks callback kwargs_handlers event_handlers"),
    **rows(
        _FORWARD,
        "training_step prepare_batch forward_fn batch_processor remove_unused_columns label_names",
    ),
    **rows(_ASYNC, "async_checkpoint async_checkpointing"),
    **rows("the whole state of the run is saved", "save_only_model weights_only save_weights_only"),
    "save_safetensors": "weights are saved as safetensors",
    "ignore_data_skip": "a resumed run continues in the middle of its epoch, without reading "
    "what is before",
    **rows(
        _NOT_NEEDED,
        "use_distributed_sampler replace_sampler_ddp even_batches dispatch_batches num_replicas",
    ),
    **rows(_NOT_NEEDED, "reload_dataloaders_every_n_epochs multiple_trainloader_mode shuffle_seed"),
    **rows(
        "unused parameters are found by themselves",
        "find_unused_parameters ddp_find_unused_parameters",
    ),
    **rows(
        "gradients are reduced in buckets by themselves",
        "ddp_bucket_cap_mb bucket_cap_mb static_graph",
    ),
    **rows("buffers are rank 0's on all workers", "ddp_broadcast_buffers broadcast_buffers"),
    **rows(_TIMEOUT, "ddp_timeout timeout process_group_timeout init_process_group_kwargs"),
    **rows(
        _IN_MODEL,
        "gradient_checkpointing gradient_checkpointing_kwargs use_liger_kernel neftune_noise_alpha",
    ),
    **rows(_MODE, "do_train do_predict do_test prediction_loss_only inference_mode"),
    **rows(
        "Transformers' tokenizer is not needed; lockstep.callbacks.Pretrained() saves the model "
        "in its own form",
        "tokenizer processing_class push_to_hub hub_model_id hub_strategy hub_token",
    ),
    "args": "the values are keyword arguments of Trainer and of its fit",
    "max_steps_per_epoch": _LIMIT,
}

_PREPARE: dict[str, str] = {
    **rows(
        "a loop of your own steps after every Nth batch, as on one device",
        "gradient_accumulation_steps",
    ),
    **rows("a DataLoader's batch size is that of the global batch", "global_batch_size batch_size"),
    **rows(
        "the loop is yours; a lockstep.Trainer has it in fit(...)",
        "epochs max_steps validate resume",
    ),
    **rows(
        'the strategy of prepare is "distributed"; a Trainer or TrainStep has strategy=', "strategy"
    ),
    **rows(
        "give the scheduler itself to prepare: lockstep.prepare(model, optimizer, loader, "
        "scheduler)",
        "scheduler",
    ),
    **rows(
        "objects are given without names: lockstep.prepare(model, optimizer, loader)",
        "model optimizer loader",
    ),
    **rows(
        "objects are given without names: lockstep.prepare(model, optimizer, loader)",
        "dataloader train_loader train_dataloader optimizers models dataset lr_scheduler",
    ),
    **rows("the loss stays in your loop", "loss_fn loss criterion"),
    **rows(
        "a loop of your own writes its files; a lockstep.Trainer has run_dir= and callbacks=",
        "run_dir callbacks",
    ),
    **rows(
        "it belongs to a lockstep.Trainer",
        "keep_checkpoints async_save save_frozen allow_different_hardware",
    ),
    **rows(
        "it belongs to a lockstep.Trainer", "max_steps_in_flight validate_every schedule devices"
    ),
    **rows("it belongs to a lockstep.Trainer", "scheduler_interval scheduler_metric replica_check"),
    **rows("it belongs to a lockstep.Trainer", "on_spike cross_check ledger fingerprint_every"),
    "forward": "the forward pass stays in your loop",
    "metrics": "lockstep.evaluate(model, loader, loss_fn, metrics) evaluates",
    "num_workers": "the loader processes are those of the DataLoader that is prepared",
    "shuffle": "it belongs to the DataLoader that is prepared",
    "fp16": 'prepare has precision="bf16"; a Trainer or TrainStep has "fp16" too',
}


_TRAIN_STEP: dict[str, str] = {
    **rows("it belongs to a lockstep.Trainer", "on_spike cross_check ledger fingerprint_every"),
    **rows(
        "it belongs to a lockstep.Trainer, which has the whole loop",
        "run_dir keep_checkpoints callbacks devices",
    ),
    **rows(
        "it belongs to a lockstep.Trainer, which has the whole loop",
        "async_save allow_different_hardware",
    ),
    **rows(
        "it belongs to a lockstep.Trainer, which has the whole loop",
        "save_frozen max_steps_in_flight",
    ),
    **rows(
        "it belongs to fit() of a lockstep.Trainer, which has the whole loop",
        "epochs validate resume max_steps",
    ),
    **rows("it belongs to fit() of a lockstep.Trainer, which has the whole loop", "validate_every"),
    **rows(
        "it belongs to the lockstep.Loader(...) whose batches are trained on",
        "global_batch_size batch_size",
    ),
    **rows(
        "it belongs to the lockstep.Loader(...) whose batches are trained on",
        "num_workers shuffle drop_last",
    ),
    **rows(
        "it belongs to the lockstep.Loader(...) whose batches are trained on",
        "collate_fn prefetch batch_sampler",
    ),
    "metrics": "lockstep.evaluate(model, loader, loss_fn, metrics) evaluates",
}


def in_training(name: str, step: str) -> str | None:
    """Return what an argument of a training is here; None if the name is not known.

    Args:
        name: its name in another library.
        step: "Trainer", "TrainStep" or "prepare": what has the options of a step.
    """
    names_of_step = {"prepare": _PREPARE, "TrainStep": _TRAIN_STEP}.get(step, {})
    text = names_of_step.get(name) or _TRAINING.get(name)
    return None if text is None else text.format(step=step)


_OF_TORCH = "not needed: batches arrive in pinned memory where there is a GPU"
_SAMPLER = (
    "batch_sampler= yields the indices of global batches; of a sampler, give fit() or prepare() a "
    "torch DataLoader(dataset, sampler=...)"
)
_SAMPLES_SEED = "the seed of order and random draws is seed="

_LOADER_NAMES: dict[str, str] = {
    **rows(
        "the samples of a step over all workers are global_batch_size=",
        "batch_size per_device_batch_size",
    ),
    "sampler": _SAMPLER,
    **rows(_OF_TORCH, "pin_memory pin_memory_device"),
    **rows(
        "not needed: the loader's processes live until the loader is closed", "persistent_workers"
    ),
    **rows(
        "batches that are loaded ahead are prefetch=, over all processes of a worker",
        "prefetch_factor",
    ),
    **rows(_SAMPLES_SEED, "generator base_seed random_state worker_init_fn"),
    **rows("the loader's processes are num_workers=", "workers num_processes loader_workers"),
    **rows("not needed: batches are always in order", "in_order"),
    **rows(_NOT_NEEDED, "num_replicas rank world_size num_shards shard"),
    **rows("the function that makes a batch is collate_fn=", "collate collator data_collator"),
    **rows(
        "the epoch is that of loader.epoch(number), or of how often the loader was iterated over",
        "epoch epochs",
    ),
    **rows("how the loader's processes are started is not an option", "multiprocessing_context"),
    **rows("how long to wait for a sample is not limited", "timeout"),
    "device": "batches are on the device of lockstep.init(device)",
    "transform": "it belongs to the data set",
}


def in_loader(name: str) -> str | None:
    """Return what an argument of a DataLoader is in a `lockstep.Loader`; None if the name is not
    known.
    """
    return _LOADER_NAMES.get(name)


INIT: dict[str, str] = {
    **rows(
        'transport= chooses the backend for tensors on the CPU ("shm", "gloo", "mpi4py"); on GPUs '
        "it is NCCL",
        "backend dist_backend ddp_backend process_group_backend",
    ),
    **rows(
        "rank and number of workers come from the launcher: lockstep run -np N",
        "rank world_size local_rank local_size num_processes process_id process_sets nproc workers",
    ),
    **rows(
        "the rendezvous comes from the launcher: lockstep run, or MASTER_ADDR and MASTER_PORT",
        "init_method store master_addr master_port coordinator_address dist_url",
    ),
    **rows(
        "device= chooses it",
        "device_id cpu use_cpu accelerator gpu cuda gpus device_ids local_device_ids",
    ),
    **rows("it is an argument of Trainer, TrainStep and prepare", "seed precision mixed_precision"),
    **rows(
        "how long a collective waits is timeout=, a datetime.timedelta", "initialization_timeout"
    ),
}
"""Other names of the arguments of `lockstep.init`: those of torch.distributed, Horovod, JAX and
Accelerate.
"""

LAUNCH: dict[str, str] = {
    **rows(
        "the number of processes is workers=",
        "nprocs nproc num_processes num_workers num_proc np world_size nproc_per_node num_gpus",
    ),
    **rows("positional arguments of the function follow it: launch(fn, a, b)", "args"),
    **rows("keyword arguments of the function are given as they are: launch(fn, a=1)", "kwargs"),
    **rows("launch waits for all workers and returns the result of rank 0", "join daemon"),
    **rows("workers are forked from a server that has loaded PyTorch", "start_method spawn"),
    **rows(
        "launch starts workers on this host; several hosts are `lockstep run -H a:4,b:4`",
        "hosts num_nodes",
    ),
    **rows("ranks find each other by themselves", "use_port master_port master_addr"),
}
"""Other names of the arguments of `lockstep.launch`: those of torch.multiprocessing, Accelerate and
Horovod.
"""


PRECISIONS: dict[str, str] = {
    **rows("fp32", "32 32-true float32 float torch.float32 no false full None 32-bit"),
    **rows("bf16", "bf16-mixed bf16-true bfloat16 torch.bfloat16 bf16_mixed amp_bf16"),
    **rows("fp16", "16 16-mixed 16-true float16 half torch.float16 fp16-mixed amp_fp16"),
}
"""Values of `precision` elsewhere, as text."""

STRATEGIES: dict[str, str] = {
    **rows(
        "distributed",
        "auto ddp ddp_spawn ddp_notebook ddp_find_unused_parameters_true single_device horovod",
    ),
    **rows("distributed", "data_parallel DistributedDataParallel"),
    **rows(
        "sharded",
        "fsdp fsdp2 full_shard zero zero3 deepspeed deepspeed_stage_2 deepspeed_stage_3 "
        "model_parallel",
    ),
    **rows("sharded", "FullyShardedDataParallel ddp_sharded hybrid_shard"),
    **rows("replicas", "dp DataParallel mirrored MirroredStrategy"),
}
"""Names of strategies elsewhere."""

_COMMUNICATOR = "it belongs to the communicator: comm = lockstep.init(), then comm.{name}"
_PREPARED = "lockstep.prepare(model, optimizer, loader) does it: the loop keeps loss.backward()"
_HOROVOD = (
    "lockstep.prepare(model, optimizer, loader) does it; or keep Horovod's interface: import "
    "lockstep.compat.horovod.torch as hvd"
)
_CHECKPOINT_RECIPE = (
    'a Trainer has run_dir= and fit(..., resume="latest"); for a loop of your own there is the '
    "recipe Resume from a checkpoint"
)
_EVALUATE = "lockstep.evaluate(model, loader, loss_fn, metrics) counts every sample once"
_INIT = "the workers and the device are found by comm = lockstep.init()"

PACKAGE_NAMES: dict[str, str] = {
    **rows(
        _COMMUNICATOR,
        "rank size local_rank local_size allreduce allgather broadcast_object allgather_object "
        "alltoall barrier",
    ),
    **rows(_PREPARED, "backward accumulate clip_grad_norm_ clip_grad_value_ no_sync"),
    **rows(_HOROVOD, "DistributedOptimizer broadcast_parameters broadcast_optimizer_state"),
    **rows(_CHECKPOINT_RECIPE, "save_state load_state"),
    **rows(_EVALUATE, "gather_for_metrics metric_average"),
    **rows(_INIT, "Accelerator Fabric is_initialized"),
    **rows("it is lockstep.launch(fn, workers=N)", "notebook_launcher"),
    **rows(
        "it is torch.manual_seed(0) before the model is made; seed= of prepare and Trainer is that "
        "of order and dropout",
        "set_seed seed_everything",
    ),
    **rows("on rank 0: if comm.rank == 0: print(...)", "print is_main_process"),
    **rows("it is comm.barrier(), with comm = lockstep.init()", "wait_for_everyone"),
}
"""Names that people look for in the package: those of Accelerate, Fabric and Horovod."""

LOADER_NAMES: dict[str, str] = rows(
    "it is not needed: each epoch has an order of its own, by seed and epoch",
    "sampler batch_sampler set_epoch",
)
"""Attributes that a prepared loader does not have, unlike a `DataLoader`."""


def hint_in(names: Mapping[str, str], name: str) -> str:
    """Return what follows "has no attribute 'name'" in an error: "" if the name is not known."""
    return f": {names[name].format(name=name)}" if name in names else ""
