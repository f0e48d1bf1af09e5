"""Flags of OpenRLHF's programs in the older and the newer spelling, for tests of configs/openrlhf.yaml."""

OF_SUPERVISED = """
    save_path save_steps save_hf_ckpt disable_ds_ckpt logging_steps eval_steps ckpt_path max_ckpt_num max_ckpt_mem
    load_checkpoint use_ds_universal_ckpt micro_train_batch_size train_batch_size max_norm gradient_checkpointing deepcompile
    seed full_determinism local_rank zero_stage bf16 zpg adam_offload attn_implementation flash_attn use_liger_kernel
    grad_accum_dtype overlap_comm gradient_checkpointing_use_reentrant disable_fast_tokenizer ds_tensor_parallel_size
    max_epochs aux_loss_coef pretrain learning_rate lr_warmup_ratio lr_scheduler l2 adam_betas ring_attn_size
    ring_head_stride load_in_4bit lora_rank lora_alpha target_modules lora_dropout packing_samples dataset dataset_probs
    eval_dataset dataset_split eval_split max_samples input_template apply_chat_template tokenizer_chat_template max_len
    use_wandb wandb_org wandb_group wandb_project wandb_run_name use_tensorboard use_ms
"""
FLAGS = {
    ("train_sft", "older"): OF_SUPERVISED + " pretrain_mode input_key output_key multiturn disable_trace_cache train_split",
    ("train_rm", "older"): OF_SUPERVISED
    + " value_head_prefix compute_fp32_loss margin_loss loss prompt_key chosen_key rejected_key dist_backend",
    ("train_dpo", "older"): OF_SUPERVISED
    + " ref_offload beta ipo label_smoothing nll_loss_coef ref_pretrain prompt_key chosen_key rejected_key train_split",
    ("train_dpo", "newer"): """
        adam.betas adam.eps adam.lr adam.weight_decay ckpt.disable_ds ckpt.load_enable ckpt.max_mem ckpt.max_num ckpt.output_dir
        ckpt.path ckpt.save_hf ckpt.save_steps data.apply_chat_template data.chosen_key data.dataloader_num_workers data.dataset
        data.dataset_probs data.dataset_split data.disable_fast_tokenizer data.input_template data.max_len data.max_samples
        data.prompt_key data.rejected_key data.tokenizer_chat_template ds.adam_offload ds.attn_implementation ds.deepcompile
        ds.experts_implementation ds.grad_accum_dtype ds.load_in_4bit ds.lora.alpha ds.lora.dropout ds.lora.rank
        ds.lora.target_modules ds.overlap_comm ds.packing_samples ds.param_dtype ds.ring_attn_head_stride ds.ring_attn_size
        ds.tensor_parallel_size ds.use_liger_kernel ds.use_universal_ckpt ds.zero_stage ds.zpg eval.dataset eval.split eval.steps
        local_rank logger.logging_steps logger.tensorboard_dir logger.wandb.group logger.wandb.key logger.wandb.org
        logger.wandb.project logger.wandb.run_name lr_scheduler lr_warmup_ratio max_norm min_lr_ratio model.aux_loss_coef
        model.beta model.gradient_checkpointing_enable model.gradient_checkpointing_reentrant model.ipo_enable
        model.label_smoothing
        model.model_name_or_path model.nll_loss_coef muon.lr muon.momentum muon.nesterov muon.no_nesterov muon.ns_steps optim
        ref.model_name_or_path ref.offload train.batch_size train.full_determinism_enable train.max_epochs train.micro_batch_size
        train.seed use_ms
    """,
    ("train_ppo_ray", "older"): """
        ref_num_nodes ref_num_gpus_per_node reward_num_nodes reward_num_gpus_per_node colocate_actor_ref actor_num_nodes
        actor_num_gpus_per_node critic_num_nodes critic_num_gpus_per_node colocate_critic_reward colocate_all_models
        vllm_num_engines vllm_tensor_parallel_size vllm_sync_backend vllm_sync_with_ray enable_prefix_caching enforce_eager
        vllm_enable_sleep vllm_gpu_memory_utilization enable_vllm_is_correction vllm_is_truncated_threshold async_train
        async_queue_size eval_steps save_steps logging_steps ckpt_path save_hf_ckpt disable_ds_ckpt max_ckpt_num max_ckpt_mem
        load_checkpoint use_ds_universal_ckpt local_rank zero_stage gradient_checkpointing deepcompile bf16 enable_ema
        ema_beta zpg adam_offload actor_init_on_gpu attn_implementation use_liger_kernel grad_accum_dtype overlap_comm
        gradient_checkpointing_use_reentrant disable_fast_tokenizer deepspeed_enable_sleep ds_tensor_parallel_size
        packing_samples use_dynamic_batch rollout_max_tokens_per_gpu train_max_tokens_per_gpu load_in_4bit lora_rank
        lora_alpha target_modules lora_dropout save_path num_episodes rollout_batch_size vllm_generate_batch_size
        rollout_tasks_per_gpu micro_rollout_batch_size max_epochs prompt_max_len generate_max_len max_len max_samples
        max_norm l2 ptx_coef eps_clip eps_clip_low_high dual_clip value_clip lambd gamma micro_train_batch_size
        train_batch_size normalize_reward top_p temperature seed full_determinism freezing_actor_steps n_samples_per_prompt
        save_value_network actor_learning_rate critic_learning_rate lr_warmup_ratio lr_scheduler kl_target kl_horizon
        init_kl_coef policy_loss_type kl_estimator aux_loss_coef entropy_loss_coef adam_betas reward_clip_range
        advantage_estimator use_kl_loss no_advantage_std_norm overlong_buffer_len overlong_penalty_factor ring_attn_size
        ring_head_stride pretrain reward_pretrain remote_rm_url critic_pretrain value_head_prefix ref_reward_offload
        agent_func_path prompt_data prompt_data_probs prompt_split eval_dataset eval_split eval_temperature
        eval_n_samples_per_prompt input_key label_key input_template apply_chat_template use_wandb wandb_org wandb_group
        wandb_project wandb_run_name dynamic_filtering dynamic_filtering_reward_range use_tensorboard perf use_ms backend
        flash_attn pretrain_data pretrain_split use_kl_estimator_k3
    """,
    ("train_ppo_ray", "newer"): """
        ref.num_nodes ref.num_gpus_per_node reward.num_nodes reward.num_gpus_per_node train.colocate_actor_ref
        actor.num_nodes actor.num_gpus_per_node critic.num_nodes critic.num_gpus_per_node train.colocate_critic_reward
        train.colocate_all vllm.num_engines vllm.tensor_parallel_size vllm.sync_backend vllm.sync_with_ray
        vllm.enable_prefix_caching vllm.enforce_eager vllm.enable_sleep vllm.gpu_memory_utilization
        algo.advantage.is_correction_enable algo.advantage.is_correction_threshold algo.advantage.is_correction_type
        train.async_enable train.async_queue_size train.partial_rollout_enable eval.steps ckpt.save_steps
        logger.logging_steps ckpt.path ckpt.save_hf ckpt.disable_ds ckpt.max_num ckpt.max_mem ckpt.load_enable
        ckpt.best_metric_key ds.use_universal_ckpt local_rank ds.zero_stage actor.gradient_checkpointing_enable
        ds.deepcompile ds.param_dtype train.enable_ema train.ema_beta ds.zpg ds.adam_offload ds.attn_implementation
        ds.experts_implementation ds.use_liger_kernel ds.grad_accum_dtype ds.overlap_comm
        actor.gradient_checkpointing_reentrant data.disable_fast_tokenizer data.dataloader_num_workers ds.enable_sleep
        ds.tensor_parallel_size ds.packing_samples train.dynamic_batch_enable rollout.max_tokens_per_gpu
        train.max_tokens_per_gpu ds.load_in_4bit ds.lora.rank ds.lora.alpha ds.lora.target_modules ds.lora.dropout
        ckpt.output_dir train.num_episodes rollout.batch_size rollout.vllm_generate_batch_size rollout.micro_batch_size
        train.max_epochs data.max_len rollout.max_new_tokens data.max_samples actor.eps_clip actor.eps_clip_low_high
        actor.dual_clip critic.value_clip algo.advantage.lambd algo.advantage.gamma train.micro_batch_size train.batch_size
        reward.normalize_enable rollout.top_p rollout.temperature train.seed train.full_determinism_enable
        critic.freezing_steps rollout.n_samples_per_prompt critic.save_value_network algo.kl.target algo.kl.horizon
        algo.kl.init_coef actor.policy_loss_type algo.kl.estimator actor.aux_loss_coef actor.entropy_coef reward.clip_range
        actor.optim actor.muon.lr actor.muon.momentum actor.muon.ns_steps actor.muon.nesterov actor.muon.no_nesterov
        actor.adam.lr actor.adam.betas actor.adam.eps actor.adam.weight_decay actor.lr_scheduler actor.lr_warmup_ratio
        actor.min_lr_ratio actor.max_norm critic.optim critic.muon.lr critic.muon.momentum critic.muon.ns_steps
        critic.muon.nesterov critic.muon.no_nesterov critic.adam.lr critic.adam.betas critic.adam.eps
        critic.adam.weight_decay critic.lr_scheduler critic.lr_warmup_ratio critic.min_lr_ratio critic.max_norm
        algo.advantage.estimator algo.kl.use_loss algo.advantage.no_std_norm reward.overlong_buffer_len
        reward.overlong_penalty_factor reward.stop_properly_penalty_coef ds.ring_attn_size ds.ring_attn_head_stride
        actor.model_name_or_path reward.model_name_or_path reward.remote_url critic.model_name_or_path ds.value_head_prefix
        ref.offload reward.offload train.agent_func_path data.prompt_dataset data.prompt_probs data.prompt_split eval.dataset
        eval.split eval.temperature eval.n_samples_per_prompt data.input_key data.label_key data.input_template
        data.apply_chat_template logger.wandb.key logger.wandb.org logger.wandb.group logger.wandb.project
        logger.wandb.run_name algo.dynamic_filtering_enable algo.dynamic_filtering_range data.image_key
        data.max_images_per_prompt actor.freeze_visual_encoder logger.tensorboard_dir use_ms
    """,
    ("batch_inference", "older"): """
        eval_task local_rank fsdp2_tp_size fsdp2_cp_size fsdp2_cpu_offload fsdp2_reshard_after_forward sequence_parallel
        tp_loss_parallel param_dtype attn_implementation disable_fast_tokenizer micro_batch_size seed full_determinism
        pretrain value_head_prefix dataset dataset_probs dataset_split input_key output_key apply_chat_template
        input_template max_len max_samples output_path prompt_max_len max_new_tokens greedy_sampling top_p temperature
        repetition_penalty best_of_n post_processor tp_size max_num_seqs enable_prefix_caching iter rollout_batch_size
        normalize_reward reward_template enable_csft csft_prompt use_ms bf16 zero_stage
    """,
}
"""By program and spelling."""
