RolloutCorrectionConfig.token_is(threshold=2.0)
# or equivalently:
RolloutCorrectionConfig(
    rollout_is="token",
    rollout_is_threshold=2.0,
    rollout_rs=None,
)
