"""Tests that are slow by nature, and how many cases of each run by default.

Sweeps of all activations and of all numbers of 16 bits, compilation ahead of time for each target, torch's inductor,
trainings, and interpreted kernels: a few cases of each, evenly spaced, find what breaks them all. The same goes for
products of many parameters, and for what starts processes or compiles. ``pytest -m slow`` runs the others.
"""

from collections.abc import Sequence
from typing import Any

import pytest

#: Of a test with more cases so many are not slow.
MOST = 16
#: Of these none are slow, but those named below: their cases are quick, or pairs already.
WHOLE = ("test_architecture", "test_contracts", "test_messages")

#: Module -> test -> how many of its cases are not slow, where that is another number.
SLOW: dict[str, dict[str, int]] = {
    "test_analysis": {
        "test_each_is_what_it_was_expected_to_be": 5,
        "test_float32_outputs_tell_everywhere": 8,
        "test_no_nan_but_eagers_and_0_where_it_is_flat": 12,
        "test_on_a_device": 5,
        "test_the_derivative_is_as_accurate_as_gelus": 10,
    },
    "test_aot": {
        "test_everything_compiles_without_spills": 0,
        "test_gates_compile_without_spills": 0,
        "test_many_sums_compile_without_spills": 0,
        "test_other_devices": 0,
        "test_what_users_bring_compiles_without_spills": 0,
    },
    "test_bench": {
        "test_blocks_are_measured_by_others_and_who_is_missing_is_named": 0,
        "test_each_benchmark_measures_its_cases": 2,
    },
    "test_codegen": {
        "test_every_row_prints_a_readable_function": 3,
        "test_functions_are_accurate_everywhere": 5,
        "test_powers_of_any_sign": 8,
    },
    "test_contexts": {
        "test_constants_made_inside_a_context_serve_outside": 2,
        "test_every_activation_compiles": 0,
        "test_the_first_use_may_be_compiled": 0,
        "test_torch_func_for_every_activation": 5,
    },
    "test_contracts": {
        "test_autocast": 54,
        "test_backward_twice": 54,
        "test_compiled": 5,
        "test_copies": 54,
        "test_edits_between_the_passes": 54,
        "test_frozen_parts": 54,
        "test_gradients_of_many_outputs": 81,
        "test_saved_bytes": 54,
        "test_second_derivatives": 81,
        "test_several_uses": 54,
        "test_threads": 54,
        "test_traces": 16,
    },
    "test_conv": {"test_strides_are_torchs": 54, "test_the_peak_is_lower_by_a_tensor": 0},
    "test_custom": {
        "test_a_bias_may_run_along_another_dimension": 11,
        "test_higher_derivatives": 3,
        "test_numbers_that_change_at_every_call_are_given_up": 0,
        "test_values_and_gradients": 8,
        "test_what_the_table_has_is_recognised": 2,
    },
    "test_distributed": {"test_losses_gradients_and_saved_bytes_of_each_process": 0},
    "test_explain": {
        "test_kinds_and_reasons": 8,
        "test_names_of_the_table": 6,
        "test_tensors_along_any_dimension_are_tried_on_inputs_that_have_it": 6,
    },
    "test_fit": {"test_distributed": 0, "test_losses_are_those_of_the_model_as_it_was": 1},
    "test_fit_compiled": {
        "test_budgets_hold": 0,
        "test_graphs_that_break": 0,
        "test_inductor": 0,
        "test_inductor_at_the_peak": 0,
        "test_the_options_of_torch_compile": 0,
    },
    "test_functional": {"test_first_and_second_derivatives": 12},
    "test_functions": {"test_functions": 1},
    "test_fuse_training": {"test_adapters": 1},
    "test_gpu_check": {"test_it_runs_on_the_fake_driver": 0, "test_killed_at_any_time_it_leaves_what_it_has": 0},
    "test_integrations": {"test_lightning": 3, "test_torchtitans_order": 2, "test_trainer": 3, "test_trl": 1},
    "test_invertible_layers": {"test_couplings": 5, "test_peak_memory_does_not_grow_with_depth": 0},
    "test_loops": {"test_every_16_bit_number_is_widened_as_torch_does": 2},
    "test_mlp": {
        "test_masks_do_not_depend_on_what_needs_a_gradient": 1,
        "test_never_more_than_eager_is_kept": 5,
        "test_the_peak_through_forward_and_backward": 1,
        "test_the_peak_where_few_rows_meet_large_weights": 2,
    },
    "test_models": {"test_the_same_bits": 5},
    "test_notebooks": {"test_my_model": 0},
    "test_private_names": {
        "test_a_fault_of_any_name_raises_nowhere_and_changes_no_gradient": 0,
        "test_no_other_file_uses_one": 999,
    },
    "test_programs": {"test_programs": 1},
    "test_races": {"test_elementwise": 1},
    "test_project": {"test_the_documentation_has_all_names": 0},
    "test_readme": {"test_examples_run": 0},
    "test_save_once": {
        "test_nodes_of_this_torch": 99,
        "test_rows_replay": 99,
        "test_selective_checkpoints_are_pytorchs": 5,
        "test_the_same_bits": 68,
        "test_three_counts_agree": 6,
    },
    "test_saved_memory": {"test_compiled": 4, "test_compiled_by_inductor": 0, "test_the_peak_is_two_hidden_buffers": 1},
    "test_second_runs": {"test_engines": 0},
    "test_sublinear_contexts": {"test_compiled": 1},
    "test_sublinear_plans": {"test_plans_keep_what_they_say": 6},
    "test_triton": {
        "test_every_16_bit_number_backward": 9,
        "test_every_16_bit_number_forward": 10,
        "test_forward": 8,
        "test_gradient_given_the_input": 12,
        "test_gradient_given_the_output": 9,
        "test_layouts": 5,
        "test_special_float32_numbers": 8,
    },
    "test_triton_operands": {
        "test_functions_without_parameters": 2,
        "test_layouts": 2,
        "test_trainable_functions": 2,
        "test_what_lies_outside_does_not_count": 5,
    },
}


def mark(items: Sequence[pytest.Item]) -> None:
    """Mark cases as slow, but for those that stay: one of each of as many equal parts, at another place in each, for
    parameters repeat at equal distances. Cases that are marked already do not count."""
    cases: dict[tuple[str, str], list[Any]] = {}
    for item in items:
        name = getattr(item, "originalname", None) or item.name
        if item.get_closest_marker("slow") is None:
            cases.setdefault((item.path.stem, name), []).append(item)
    for (module, name), found in cases.items():
        most = len(found) if module in WHOLE else MOST
        stay = min(SLOW.get(module, {}).get(name, most), len(found))
        fast = {int((i + (0.5 + 0.618 * i) % 1) * len(found) / stay) for i in range(stay)}
        for number, item in enumerate(found):
            if number not in fast:
                item.add_marker(pytest.mark.slow)
