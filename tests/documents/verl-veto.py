RolloutCorrectionConfig(..., rollout_token_veto_threshold=1e-4)
