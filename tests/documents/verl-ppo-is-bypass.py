RolloutCorrectionConfig.ppo_is_bypass(threshold=2.0)
# or equivalently:
RolloutCorrectionConfig(
    rollout_is="token",
    rollout_is_threshold=2.0,
    rollout_rs=None,
    bypass_old_logprob_for_rollout=True,
    use_pure_rollout_correction=False,
)
