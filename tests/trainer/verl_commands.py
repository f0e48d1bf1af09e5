"""Two command lines as users of verl type them today, with this project's module name. Tests run the text unchanged."""

SMALL_BATCH = """
python3 -m trainer.main_ppo \\
    actor_rollout_ref.rollout.name=sglang \\
    data.train_files=$DATA_DIR/train.parquet \\
    data.val_files=$DATA_DIR/test.parquet \\
    data.train_batch_size=64 \\
    data.val_batch_size=1312 \\
    data.max_prompt_length=512 \\
    data.max_response_length=1 \\
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \\
    actor_rollout_ref.model.enable_gradient_checkpointing=True \\
    actor_rollout_ref.actor.fsdp_config.param_offload=True \\
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \\
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \\
    actor_rollout_ref.ref.log_prob_micro_batch_size=16 \\
    actor_rollout_ref.ref.fsdp_config.param_offload=True \\
    critic.optim.lr=1e-5 \\
    critic.model.use_remove_padding=True \\
    critic.model.path=Qwen/Qwen2-7B-Instruct \\
    critic.model.enable_gradient_checkpointing=True \\
    critic.ppo_micro_batch_size=16 \\
    critic.model.fsdp_config.param_offload=True \\
    critic.model.fsdp_config.optimizer_offload=True \\
    algorithm.kl_ctrl.kl_coef=0.001 \\
    trainer.critic_warmup=0 \\
    trainer.logger=['console'] \\
    +trainer.val_before_train=False \\
    trainer.default_hdfs_dir=null \\
    trainer.n_gpus_per_node=4 \\
    trainer.nnodes=1 \\
    trainer.save_freq=-1 \\
    trainer.test_freq=10 \\
    trainer.total_epochs=2
"""

LONG_ANSWERS = """
train_files="['$DATA_DIR/train.parquet', '$DATA_DIR/math/train.parquet']"
test_files="['$DATA_DIR/test.parquet', '$DATA_DIR/math/test.parquet']"
TIME=$(date +"%Y-%m-%d-%H-%M")
python3 -m trainer.main_ppo \\
    data.train_files="$train_files" \\
    data.val_files="$test_files" \\
    data.train_batch_size=2048 \\
    data.max_prompt_length=4096 \\
    data.max_response_length=4096 \\
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.model.enable_gradient_checkpointing=True \\
    actor_rollout_ref.actor.ppo_mini_batch_size=512 \\
    actor_rollout_ref.actor.use_dynamic_bsz=True \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000 \\
    actor_rollout_ref.actor.fsdp_config.param_offload=True \\
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.name=sglang \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.2 \\
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24000 \\
    actor_rollout_ref.rollout.free_cache_engine=True \\
    actor_rollout_ref.ref.fsdp_config.param_offload=True \\
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=24000 \\
    critic.optim.lr=1e-5 \\
    critic.model.use_remove_padding=True \\
    critic.model.path=Qwen/Qwen2-7B-Instruct \\
    critic.model.enable_gradient_checkpointing=True \\
    critic.ppo_max_token_len_per_gpu=98304 \\
    critic.model.fsdp_config.param_offload=True \\
    critic.model.fsdp_config.optimizer_offload=True \\
    algorithm.kl_ctrl.kl_coef=0.001 \\
    trainer.critic_warmup=0 \\
    trainer.logger=['console','wandb'] \\
    trainer.project_name='verl_example_gsm8k' \\
    trainer.experiment_name="qwen2-7b_sglang_0.4.3.post2_function_rm_bsz8k_p4k_r4k_seq_packing-${TIME}" \\
    trainer.n_gpus_per_node=8 \\
    +trainer.val_before_train=False \\
    trainer.nnodes=1 \\
    trainer.save_freq=-1 \\
    trainer.test_freq=5 \\
    trainer.total_epochs=15
"""

# Appended to the command line to make the run small; models and data are given separately.
SMALL_RUN = (
    "actor_rollout_ref.rollout.name=embedded",
    "trainer.device=cpu",
    "trainer.n_gpus_per_node=2",
    "data.train_batch_size=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "data.max_prompt_length=64",
    "data.max_response_length=32",
    "trainer.total_training_steps=2",
)
