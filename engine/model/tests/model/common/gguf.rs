//! A hub checkpoint as the converter to GGUF writes it.

use windlass_checkpoint::testing::GgufBuilder;

use super::hub::Family;

/// The family's checkpoint as a GGUF file of this architecture.
pub fn gguf(family: &Family, architecture: &str) -> Vec<u8> {
    gguf_builder(family, architecture).build()
}

/// The same, to be changed before it is built.
pub fn gguf_builder(family: &Family, architecture: &str) -> GgufBuilder {
    let is_gemma = architecture.starts_with("gemma");
    let mut stacks: Vec<(String, Vec<u64>, Vec<f32>)> = Vec::new();
    let mut file = metadata(family, architecture);
    for (name, shape, mut values) in family.tensors() {
        let turns = ["llama", "smollm3"].contains(&architecture)
            && (name.ends_with("q_proj.weight") || name.ends_with("k_proj.weight"));
        if turns {
            values = interleaved(&values, shape[0] as usize, family.head_dim() as usize);
        }
        if is_gemma && name.ends_with("norm.weight") {
            values.iter_mut().for_each(|value| *value += 1.0);
        }
        let name = gguf_name(&name, architecture);
        let dims: Vec<u64> = shape.iter().rev().copied().collect();
        match stacks.iter_mut().find(|(stack, ..)| *stack == name) {
            Some((_, dims, all)) => {
                dims[2] += 1;
                all.extend(values);
            }
            None if name.contains("_exps") => stacks.push((name, vec![dims[0], dims[1], 1], values)),
            None if name.contains("_inp_shexp") => file = file.tensor_f32(&name, &dims[..1], &values),
            None => file = file.tensor_f32(&name, &dims, &values),
        }
    }
    stacks.iter().fold(file, |file, (name, dims, values)| file.tensor_f32(name, dims, values))
}

fn metadata(family: &Family, architecture: &str) -> GgufBuilder {
    let key = |name: &str| format!("{architecture}.{name}");
    let config = &family.config;
    let mut file = GgufBuilder::new()
        .str("general.architecture", architecture)
        .u32(&key("attention.key_length"), family.head_dim() as u32)
        .u32(&key("attention.value_length"), family.head_dim() as u32);
    for (name, hub) in [
        ("block_count", "num_hidden_layers"),
        ("context_length", "max_position_embeddings"),
        ("embedding_length", "hidden_size"),
        ("feed_forward_length", "intermediate_size"),
        ("attention.head_count", "num_attention_heads"),
        ("attention.head_count_kv", "num_key_value_heads"),
        ("attention.sliding_window", "sliding_window"),
        ("attention.sliding_window_pattern", "sliding_window_pattern"),
        ("expert_count", "num_local_experts"),
        ("expert_count", "num_experts"),
        ("expert_used_count", "num_experts_per_tok"),
        ("expert_feed_forward_length", "moe_intermediate_size"),
        ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
        ("rope.scaling.original_context_length", "original_max_position_embeddings"),
    ] {
        let unused = name == "attention.sliding_window" && architecture.starts_with("qwen");
        if let Some(size) = config[hub].as_u64().filter(|_| !unused) {
            file = file.u32(&key(name), size as u32);
        }
    }
    for (name, hub) in [
        ("rope.freq_base", "rope_theta"),
        ("rope.freq_base_swa", "rope_local_base_freq"),
        ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
        ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "final_logit_softcapping"),
    ] {
        if let Some(number) = config[hub].as_f64() {
            file = file.f32(&key(name), number as f32);
        }
    }
    if let Some(share) = config["partial_rotary_factor"].as_f64() {
        file = file.u32(&key("rope.dimension_count"), (family.head_dim() as f64 * share) as u32);
    }
    for (name, hub) in [("rope_factors_long.weight", "long_factor"), ("rope_factors_short.weight", "short_factor")] {
        if let Some(factors) = config["rope_scaling"][hub].as_array() {
            let factors: Vec<f32> = factors.iter().map(|factor| factor.as_f64().unwrap() as f32).collect();
            file = file.tensor_f32(name, &[factors.len() as u64], &factors);
        }
    }
    file
}

/// What a GGUF file calls a tensor of the hub's.
fn gguf_name(name: &str, architecture: &str) -> String {
    for (hub, gguf) in [("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output")] {
        if let Some(rest) = name.strip_prefix(hub) {
            return format!("{gguf}{rest}");
        }
    }
    let [layer, part] = *name.strip_prefix("model.layers.").unwrap().splitn(2, '.').collect::<Vec<_>>() else {
        panic!("{name}")
    };
    let (part, kind) = part.rsplit_once('.').unwrap();
    let words: Vec<&str> = part.split('.').filter(|word| word.parse::<u32>().is_err()).collect();
    let part = match words.join(".").as_str() {
        "input_layernorm" => "attn_norm",
        "post_attention_layernorm" if ["gemma2", "gemma3"].contains(&architecture) => "post_attention_norm",
        "post_attention_layernorm" | "pre_feedforward_layernorm" => "ffn_norm",
        "post_feedforward_layernorm" => "post_ffw_norm",
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.qkv_proj" => "attn_qkv",
        "self_attn.o_proj" => "attn_output",
        "self_attn.q_norm" => "attn_q_norm",
        "self_attn.k_norm" => "attn_k_norm",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" | "mlp.gate_up_proj" => "ffn_up",
        "mlp.down_proj" => "ffn_down",
        "mlp.gate" | "block_sparse_moe.gate" => "ffn_gate_inp",
        "mlp.experts.gate_proj" | "block_sparse_moe.experts.w1" => "ffn_gate_exps",
        "mlp.experts.up_proj" | "block_sparse_moe.experts.w3" => "ffn_up_exps",
        "mlp.experts.down_proj" | "block_sparse_moe.experts.w2" => "ffn_down_exps",
        "mlp.shared_expert.gate_proj" => "ffn_gate_shexp",
        "mlp.shared_expert.up_proj" => "ffn_up_shexp",
        "mlp.shared_expert.down_proj" => "ffn_down_shexp",
        "mlp.shared_expert_gate" => "ffn_gate_inp_shexp",
        other => panic!("{other}"),
    };
    format!("blk.{layer}.{part}.{kind}")
}

/// Rows of q or k in the order in which neighbours turn together.
fn interleaved(values: &[f32], rows: usize, head_dim: usize) -> Vec<f32> {
    let cols = values.len() / rows;
    let from = |row: usize| row / head_dim * head_dim + row % 2 * head_dim / 2 + row % head_dim / 2;
    (0..rows).flat_map(|row| values[from(row) * cols..][..cols].to_vec()).collect()
}
