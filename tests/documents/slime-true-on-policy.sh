CUSTOM_ARGS=(
    --true-on-policy-mode
)
