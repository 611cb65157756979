RolloutCorrectionConfig.pure_is(threshold=2.0)
# or equivalently:
RolloutCorrectionConfig(
    rollout_is="sequence",
    rollout_is_threshold=2.0,
    rollout_rs=None,
    bypass_old_logprob_for_rollout=True,
    use_pure_rollout_correction=True,
)
