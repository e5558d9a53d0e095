//! The table of kernels equals what the sources declare.

use windlass_cuda_shim::{Declared, declared};
use windlass_kernels::cuda::table::{KernelSpec, Parameter};
use windlass_kernels::cuda::{ElementType, Kernel};

fn element(kind: ElementType) -> &'static str {
    match kind {
        ElementType::U8 => "u8",
        ElementType::Bf16 => "bf16",
        ElementType::U32 => "u32",
        ElementType::U64 => "u64",
        ElementType::F32 => "f32",
        ElementType::Address => "address",
    }
}

fn parameter(parameter: &Parameter) -> String {
    match parameter {
        Parameter::In(kind) => format!("in {}", element(*kind)),
        Parameter::Out(kind) => format!("out {}", element(*kind)),
        Parameter::Tiles(..) => "tiles".into(),
        Parameter::U32 => "u32".into(),
        Parameter::U64 => "u64".into(),
        Parameter::F32 => "f32".into(),
    }
}

fn as_declared(spec: &KernelSpec) -> Declared {
    let parameters: Vec<String> = spec.parameters.iter().map(|(_, kind)| parameter(kind)).collect();
    let (name, file, threads) = (spec.name.to_string(), spec.file.to_string(), spec.threads);
    Declared { name, file, threads, parameters: parameters.join(", ") }
}

#[test]
fn the_table_says_what_the_sources_declare() {
    let mut table: Vec<_> = Kernel::ALL.iter().map(|kernel| as_declared(kernel.spec())).collect();
    let mut sources = declared().to_vec();
    table.sort_by(|a, b| a.name.cmp(&b.name));
    sources.sort_by(|a, b| a.name.cmp(&b.name));
    assert_eq!(table, sources);
    assert!(table.iter().all(|kernel| kernel.threads.is_multiple_of(32)), "blocks are whole warps");
}
