"""How instructions are read: from lines as the disassembler and AMD's compiler print them."""

import pytest

from bench import machine_code

SASS = """
	.section	.text.kernel,"ax",@progbits
kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_0) ;
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/         @P1       LDG.E.U16.CONSTANT R4, desc[UR4][R2.64] ;
        /*0040*/                   LDGSTS.E.BYPASS.LTC128B.64 [R3], desc[UR4][R8.64] ;
        /*0050*/                   LDGDEPBAR ;
        /*0060*/             @!UP0 UIADD3 UR4, UR4, 0x1, URZ ;
.L_x_0:
        /*0070*/                 { HFMA2.MMA R5, -RZ, RZ, 0, 0 ;
        /*0080*/                   MUFU.EX2 R0, R0 ; }
        /*0090*/                   FFMA2 R4, R4, R6, R8 ;
        /*10a0*/                   STL [R1], R4 ;
        /*10b0*/                   STG.E desc[UR4][R2.64], R4 ;
        /*10c0*/                   EXIT ;
        /*10d0*/                   NOP;
"""
GCN = """
kernel:                                 ; @kernel
	.loc	1 96 0 prologue_end             ; elementwise.py:96:0
	s_load_dwordx2 s[2:3], s[0:1], 0x0
	global_load_dwordx4 v[0:3], v[4:5], off
	global_load_ushort v0, v[4:5], off
	v_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]
	v_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7]
	v_exp_f32_e32 v0, v0
	ds_read2st64_b64 v[0:3], v4
	buffer_store_dword v0, v1, s[0:3], 0 offen
	s_endpgm
"""


def test_sass_is_sorted_by_kind() -> None:
    found = machine_code.nvidia_instructions(SASS)
    counts = {kind: count for kind, count in found.kinds.items() if count}
    assert counts == {
        "fp32": 1, "special": 1, "global_loads": 3, "global_stores": 1, "local": 1, "integer": 1, "other": 5,
    }  # fmt: skip
    assert found.count == sum(counts.values()) == 13  # a NOP does nothing
    assert found.accesses == machine_code.Accesses(loads={16: 1, 8: 1, 2: 1}, stores={4: 1})


def test_amd_assembly_is_sorted_by_kind() -> None:
    found = machine_code.amd_instructions(GCN)
    counts = {kind: count for kind, count in found.kinds.items() if count}
    assert counts == {
        "tensor": 1, "fp32": 1, "special": 1, "global_loads": 2, "global_stores": 1, "shared_loads": 1, "other": 2,
    }  # fmt: skip
    assert found.count == sum(counts.values())
    assert found.accesses == machine_code.Accesses(loads={16: 1, 2: 1}, stores={4: 1})


NVIDIA = {
    "tensor": "HMMA IMMA HGMMA QGMMA UTCHMMA UTCQMMA UTCIMMA",
    "fp32": "FFMA FMUL FADD FADD2 FMUL2 FADD32I",
    "special": "MUFU",
    "global_loads": "LDG LD LDGSTS",
    "global_stores": "STG ST",
    "bulk_copies": "UTMALDG UTMASTG UTMAREDG UBLKCP",
    "shared_loads": "LDS LDSM",
    "shared_stores": "STS STSM",
    "local": "LDL STL",
    "integer": "IADD3 IMAD LEA LOP3 PLOP3 SHF PRMT ISETP VIADD VIMNMX UIADD3 ULEA USHF ULOP3 UISETP",
    "other": "HFMA2 MOV UMOV FSEL FSETP FMNMX SEL SHFL F2FP I2F BRA BAR LDC LDGDEPBAR DEPBAR UTMACMDFLUSH LDTM ATOMG",
}
AMD = {
    "tensor": "v_mfma_f32_16x16x16_f16 v_smfmac_f32_16x16x32_bf16 v_wmma_f32_16x16x16_f16",
    "fp32": "v_fma_f32 v_fmac_f32_e32 v_pk_mul_f32 v_subrev_f32_e32 v_mac_f32_e32 v_fmaak_f32",
    "special": "v_exp_f32_e32 v_rcp_f32_e32 v_rcp_iflag_f32_e32 v_rsq_f32_e64 v_sqrt_f32_e32 v_log_f32_e32",
    "global_loads": "global_load_dwordx4 buffer_load_short_d16 flat_load_dword",
    "global_stores": "global_store_dwordx2 buffer_store_dword",
    "shared_loads": "ds_read_b128 ds_read2_b64 ds_load_b128",
    "shared_stores": "ds_write_b32 ds_write2st64_b64 ds_store_b64",
    "local": "scratch_load_dwordx4 scratch_store_dword",
    "integer": "v_add_u32_e32 v_lshlrev_b64 v_and_b32_sdwa v_perm_b32 s_lshl_b32 s_cmp_lt_i32 v_cmp_gt_i64_e32",
    "other": "v_mov_b32_e32 s_movk_i32 v_cndmask_b32_e64 v_cmp_lt_f32_e64 v_cvt_f32_u32_e32 ds_bpermute_b32 s_waitcnt "
    "v_accvgpr_read_b32 v_readfirstlane_b32 s_nop s_load_dwordx4 v_ldexp_f32 s_cselect_b32",
}


@pytest.mark.parametrize(("kinds", "of_amd"), [(NVIDIA, False), (AMD, True)], ids=["nvidia", "amd"])
def test_operations_are_of_one_kind(kinds: dict[str, str], of_amd: bool) -> None:
    for expected, names in kinds.items():
        assert {name: machine_code._kind(name, of_amd) for name in names.split()} == dict.fromkeys(
            names.split(), expected
        )


def test_widths_of_amd_accesses() -> None:
    widths = {
        "dword": 4,
        "dwordx3": 12,
        "dwordx4": 16,
        "b64": 8,
        "b128": 16,
        "ushort": 2,
        "short_d16_hi": 2,
        "ubyte": 1,
    }
    assert {name: machine_code._amd_width(f"global_load_{name}") for name in widths} == widths
