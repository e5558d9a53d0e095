//! Token activations in the forms that matrix products read.

pub(crate) mod blocks;
pub(crate) mod grouping;

use half::bf16;

use crate::simd::{Kernel, Simd, nearest_bf16, widened};
use crate::weights::float::without_subnormals;
use crate::{PackedMatrix, Pool, WeightType};
use blocks::{Blocks, ScaleOf};
use grouping::{Grouping, MergesColumns};

/// Tokens that one worker converts at a time.
const CHUNK_TOKENS: usize = 8;

/// How finely activations are rounded before they multiply quantized weights, or weights in bf16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ActivationType {
    /// To 8 bits in blocks of 32: the integer units' own width. To bf16, whose significands have 8 bits, for bf16.
    #[default]
    Int8,
    /// To 8 bits, and what that leaves over to 8 bits again: an error below 2⁻¹⁵ of a block's largest value, for twice
    /// the products. To bf16 and again to bf16: an error below 2⁻¹⁶ of each value.
    Int16,
}

impl ActivationType {
    /// Passes over the weights, one for each byte of a value.
    pub(crate) fn planes(self) -> usize {
        match self {
            ActivationType::Int8 => 1,
            ActivationType::Int16 => 2,
        }
    }
}

/// A reusable buffer of activations `[tokens, cols]`, converted once for all matrices that multiply them.
///
/// Quantized weights multiply signed bytes with one f32 scale for each 32 values, or where many tokens may round otherwise for
/// 256: a K-quant's 256, which could share one, lose half as much by scales of their own (`tests/peer/logits`). Weights in bf16 multiply values in bf16, other float
/// weights the values themselves.
#[derive(Debug, Default)]
pub struct Activations {
    kind: ActivationType,
    /// Whether products of many tokens may round otherwise than those of few.
    varies: bool,
    /// Whether those that are loaded do.
    merges_columns: bool,
    tokens: usize,
    cols: usize,
    /// The planes of all tokens, or empty.
    blocks: Blocks,
    /// `[tokens, cols]`, or empty.
    values: Vec<f32>,
    /// `[tokens, planes, cols / 2]`, the last filled up with a zero, or empty.
    pairs: Vec<[bf16; 2]>,
    /// The input in the order of the matrices' columns, where they have one.
    sorted: Vec<f32>,
}

impl Activations {
    /// An empty buffer; it grows to its largest load.
    pub fn new(kind: ActivationType) -> Self {
        Activations { kind, ..Self::default() }
    }

    /// Lets products of many tokens with K-quants round inputs by 256 values, as llama.cpp does, and weights to 8 bits by as many
    /// columns, where that saves time: what comes of a token then depends on how many others there are. Not where inputs have
    /// 16 bits. Other weights keep a scale for each 32 inputs: real models have some that are much larger than the rest.
    pub fn varying(self) -> Self {
        Activations { varies: true, ..self }
    }

    /// Takes in `input`, `[tokens, inputs]` row-major, in the forms that `matrices` need.
    ///
    /// # Panics
    /// When `matrices` is empty or they differ in `cols` or order, or when `input` is not whole tokens.
    pub fn load(&mut self, pool: &Pool, input: &[f32], matrices: &[&PackedMatrix]) {
        let (cols, inputs) = (matrices[0].cols(), matrices[0].inputs());
        assert!(matrices.iter().all(|matrix| matrix.cols() == cols), "matrices that share activations share cols");
        assert!(input.len().is_multiple_of(inputs), "{} values are no whole tokens of {inputs}", input.len());
        let order = matrices[0].order();
        assert!(
            matrices.iter().all(|matrix| matrix.order() == order),
            "matrices that share activations share an order"
        );
        self.tokens = input.len() / inputs;
        self.cols = cols;
        let mut sorted = std::mem::take(&mut self.sorted);
        sorted.clear();
        if let Some(order) = order {
            let tokens = input.chunks_exact(inputs);
            let of = |token: &[f32], input: u32| token.get(input as usize).copied().unwrap_or(0.0);
            sorted.extend(tokens.flat_map(|token| order.iter().map(move |&input| of(token, input))));
        }
        self.convert(pool, if order.is_some() { &sorted } else { input }, matrices);
        self.sorted = sorted;
    }

    fn convert(&mut self, pool: &Pool, input: &[f32], matrices: &[&PackedMatrix]) {
        let cols = self.cols;
        let any = |form: Form| matrices.iter().any(|matrix| Form::of(matrix.weight_type()) == form);
        self.values.clear();
        self.pairs.clear();
        self.blocks.clear();
        if any(Form::Values) {
            self.values.extend_from_slice(input);
        }
        let planes = self.kind.planes();
        if any(Form::Pairs) {
            let per_token = planes * cols.div_ceil(2);
            self.pairs.resize(self.tokens * per_token, [bf16::ZERO; 2]);
            let chunks = input.chunks(CHUNK_TOKENS * cols).zip(self.pairs.chunks_mut(CHUNK_TOKENS * per_token));
            pool.for_each_of(self.tokens.div_ceil(CHUNK_TOKENS), chunks, |(values, pairs)| {
                pool.kernels().call(Round { values, pairs, planes, cols });
            });
        }
        if any(Form::Blocks) {
            let many = Grouping::of(pool.kernels(), self.inputs()) == Grouping::Panels;
            let merges = many && planes == 1 && pool.kernels().call(MergesColumns);
            self.merges_columns =
                self.varies && merges && matrices.iter().any(|matrix| matrix.weight_type().is_k_quant());
            let scale = if self.merges_columns { ScaleOf::Span } else { ScaleOf::Block };
            self.blocks.load(pool, input, cols, planes, scale);
        }
    }

    /// Whether products round K-quants to 8 bits by spans of columns, of which the inputs share a scale.
    pub(crate) fn merges_columns(&self) -> bool {
        self.merges_columns
    }

    /// Tokens loaded.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Values per token.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Inputs that stand for one token: their products are added up.
    pub(crate) fn planes(&self) -> usize {
        self.kind.planes()
    }

    /// What weights are multiplied with that are no plain floats: all planes of all tokens.
    pub(crate) fn inputs(&self) -> usize {
        self.tokens * self.planes()
    }

    /// All inputs in blocks.
    pub(crate) fn blocks(&self) -> &Blocks {
        assert!(self.blocks.inputs() == self.inputs(), "activations were not loaded for quantized weights");
        &self.blocks
    }

    /// The pairs of an input: plane `input % planes` of token `input / planes`.
    pub(crate) fn pairs(&self, input: usize) -> &[[bf16; 2]] {
        let per_input = self.cols.div_ceil(2);
        assert!(self.pairs.len() == self.inputs() * per_input, "activations were not loaded for weights in bf16");
        &self.pairs[input * per_input..][..per_input]
    }

    /// A token's values.
    pub(crate) fn values(&self, token: usize) -> &[f32] {
        assert!(self.values.len() == self.tokens * self.cols, "activations were not loaded for weights in f32 or f16");
        &self.values[token * self.cols..][..self.cols]
    }
}

/// What weights multiply.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Values,
    Pairs,
    Blocks,
}

impl Form {
    fn of(weight_type: WeightType) -> Form {
        match weight_type {
            WeightType::F32 | WeightType::F16 => Form::Values,
            WeightType::BF16 => Form::Pairs,
            _ => Form::Blocks,
        }
    }
}

/// Some tokens' pairs: a token's planes lie one after the other.
struct Round<'a> {
    values: &'a [f32],
    pairs: &'a mut [[bf16; 2]],
    planes: usize,
    cols: usize,
}

impl Kernel for Round<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _simd: S) {
        let per_token = self.planes * self.cols.div_ceil(2);
        for (values, pairs) in self.values.chunks(self.cols).zip(self.pairs.chunks_mut(per_token)) {
            let (coarse, fine) = pairs.split_at_mut(self.cols.div_ceil(2));
            let coarse = &mut coarse.as_flattened_mut()[..self.cols];
            for i in 0..self.cols {
                coarse[i] = without_subnormals(nearest_bf16(values[i]));
            }
            if !fine.is_empty() {
                let fine = &mut fine.as_flattened_mut()[..self.cols];
                for i in 0..self.cols {
                    fine[i] = without_subnormals(nearest_bf16(values[i] - widened(coarse[i])));
                }
            }
        }
    }
}
