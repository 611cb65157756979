RolloutCorrectionConfig.geo_rs(
    rs_threshold=1.001,  # Very tight threshold (±0.1%)
    rs_threshold_lower=None,
    veto_threshold=1e-4,
)
