"""How instructions are read: from lines as the disassembler and AMD's compiler print them."""

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


def test_instructions_of_sass() -> None:
    assert machine_code.nvidia_instructions(SASS) == 13  # a NOP does nothing


def test_accesses_of_amd_assembly() -> None:
    assert machine_code.amd_accesses(GCN) == machine_code.Accesses(loads={16: 1, 2: 1}, stores={4: 1})
