RolloutCorrectionConfig.seq_is_rs(
    is_threshold=2.0,
    rs_threshold=2.0,
    rs_threshold_lower=None,  # defaults to 1/rs_threshold
)
# Alias:
RolloutCorrectionConfig.seq_mis(threshold=2.0)
