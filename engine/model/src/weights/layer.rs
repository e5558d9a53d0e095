//! The tensors of one decoder layer.

use super::TensorError;
use super::finder::Finder;
use super::loader::{GatedFiles, WeightLoader};
use super::matrix::{MatrixTensor, VectorTensor};
use crate::config::names::{self, Name};
use crate::config::{DecoderConfig, ExpertsConfig};
use crate::decoder::{Attention, FeedForward, Layer, Layout, Mixer};
use crate::weights::part::{GatedParts, Part, Parts};

#[derive(Debug)]
pub(super) struct LayerTensors<'a> {
    attention_norm: VectorTensor<'a>,
    /// The projections of query, key and value.
    inputs: [MatrixTensor<'a>; 3],
    out: MatrixTensor<'a>,
    /// Biases of query, key and value.
    biases: Option<[VectorTensor<'a>; 3]>,
    /// Norms of query heads and of key heads.
    head_norms: Option<[VectorTensor<'a>; 2]>,
    /// Whether heads are rotated by position.
    rotary: bool,
    /// Norms after the attention and after the feed-forward block.
    post_norms: Option<[VectorTensor<'a>; 2]>,
    feed_forward_norm: VectorTensor<'a>,
    feed_forward: FeedForwardTensors<'a>,
}

#[derive(Debug)]
enum FeedForwardTensors<'a> {
    Dense(Box<GatedTensors<'a>>),
    Experts(Box<ExpertTensors<'a>>),
}

#[derive(Debug)]
struct ExpertTensors<'a> {
    router: MatrixTensor<'a>,
    experts: Vec<GatedTensors<'a>>,
    shared: Option<SharedTensors<'a>>,
}

/// Gate, up and down.
type GatedTensors<'a> = [MatrixTensor<'a>; 3];
/// The shared expert, and the vector whose product with a token is its weight.
type SharedTensors<'a> = (GatedTensors<'a>, VectorTensor<'a>);

impl<'a> LayerTensors<'a> {
    pub fn find(
        finder: &mut Finder<'a>,
        config: &DecoderConfig,
        index: usize,
    ) -> Result<LayerTensors<'a>, TensorError> {
        let naming = finder.naming;
        let name = |part: Name| naming.weight(index, part);
        let [hidden, query, kv] = [config.hidden, config.query_width(), config.kv_width()].map(|size| size as u64);
        let before = if config.post_norms { names::PRE_FEED_FORWARD_NORM } else { names::FEED_FORWARD_NORM };
        let post_norms = [names::POST_ATTENTION_NORM, names::POST_FEED_FORWARD_NORM];
        let mut post_norm = |part: Name| finder.norm(&name(part), hidden);
        let post_norms = match config.post_norms {
            true => Some([post_norm(post_norms[0])?, post_norm(post_norms[1])?]),
            false => None,
        };
        Ok(LayerTensors {
            attention_norm: finder.norm(&name(names::ATTENTION_NORM), hidden)?,
            inputs: find_inputs(finder, config, index)?,
            out: finder.matrix(&name(names::OUT), [query, hidden])?,
            biases: config.biases.then(|| finder.biases(index, query, kv)).transpose()?,
            head_norms: config.head_norms.then(|| finder.head_norms(index, config.head_dim as u64)).transpose()?,
            rotary: config.rope.layers.contains(index),
            post_norms,
            feed_forward_norm: finder.norm(&name(before), hidden)?,
            feed_forward: FeedForwardTensors::find(finder, config, index)?,
        })
    }

    pub fn vectors(&self) -> impl Iterator<Item = &VectorTensor<'a>> {
        let norms = [&self.attention_norm, &self.feed_forward_norm];
        let more = self.biases.iter().flatten().chain(self.head_norms.iter().flatten());
        norms.into_iter().chain(more).chain(self.post_norms.iter().flatten()).chain(self.feed_forward.vector())
    }

    pub fn matrices(&self) -> impl Iterator<Item = &MatrixTensor<'a>> {
        self.products().chain(self.feed_forward.router())
    }

    /// All matrices but the router, which is never quantized.
    pub fn products(&self) -> impl Iterator<Item = &MatrixTensor<'a>> {
        self.inputs.iter().chain([&self.out]).chain(self.feed_forward.products())
    }

    /// Every matrix, with a rank's part of it.
    pub fn parts<'p>(&self, parts: &'p Parts) -> impl Iterator<Item = (&MatrixTensor<'a>, &'p Part)> {
        let Parts { query, key, out, .. } = parts;
        let attention = self.inputs.iter().chain([&self.out]).zip([query, key, key, out]);
        attention.chain(self.feed_forward.parts(parts))
    }

    /// The largest number of columns of the feed-forward block that cannot be divided among ranks.
    pub fn feed_forward_block(&self, whole_experts: bool) -> usize {
        self.feed_forward.downs(whole_experts).map(|down| down.block()).max().unwrap_or(1)
    }

    /// Loads a rank's part of the layer with this index in its stage.
    pub fn load<L: WeightLoader<'a>>(
        &self,
        index: usize,
        loader: &L,
        parts: &Parts,
    ) -> Result<Layer<L::Device>, L::Error> {
        let norm = |vector: &VectorTensor<'a>| loader.vector(vector.values(&Part::Whole));
        let post_norm = |at: usize| self.post_norms.as_ref().map(|norms| norm(&norms[at])).transpose();
        Ok(Layer {
            mixer_norm: norm(&self.attention_norm)?,
            mixer: Mixer::Attention(self.attention(index, loader, parts)?),
            post_mixer_norm: post_norm(0)?,
            feed_forward_norm: norm(&self.feed_forward_norm)?,
            feed_forward: self.feed_forward.load(index, loader, parts)?,
            post_feed_forward_norm: post_norm(1)?,
        })
    }

    fn attention<L: WeightLoader<'a>>(
        &self,
        index: usize,
        loader: &L,
        parts: &Parts,
    ) -> Result<Attention<L::Device>, L::Error> {
        let of_rows = [&parts.query, &parts.key, &parts.key];
        let [query, key, value] = &self.inputs;
        let files = [query.read(loader, of_rows[0])?, key.read(loader, of_rows[1])?, value.read(loader, of_rows[2])?];
        let bias = |biases: &[VectorTensor<'a>; 3]| {
            let values = biases.iter().zip(of_rows).flat_map(|(bias, part)| bias.values(part));
            loader.vector(values.collect())
        };
        let norm = |vector: &VectorTensor<'a>| loader.vector(vector.values(&Part::Whole));
        let head_norms = |[query, key]: &[VectorTensor<'a>; 2]| Ok::<_, L::Error>([norm(query)?, norm(key)?]);
        Ok(Attention {
            qkv: loader.qkv(index, files)?,
            bias: self.biases.as_ref().map(bias).transpose()?,
            head_norms: self.head_norms.as_ref().map(head_norms).transpose()?,
            is_rotary: self.rotary,
            out: loader.out(index, self.out.read(loader, &parts.out)?)?,
        })
    }
}

/// Finds query, key and value: a tensor each, or rows of one tensor.
fn find_inputs<'a>(
    finder: &mut Finder<'a>,
    config: &DecoderConfig,
    index: usize,
) -> Result<[MatrixTensor<'a>; 3], TensorError> {
    let (naming, hidden) = (finder.naming, config.hidden as u64);
    let (query, kv) = (config.query_width(), config.kv_width());
    if config.fused {
        let all = finder.matrix(&naming.weight(index, names::FUSED_QKV), [hidden, (query + 2 * kv) as u64])?;
        return Ok([0..query, query..query + kv, query + kv..query + 2 * kv].map(|rows| all.rows(rows)));
    }
    let mut find = |part: Name, rows: usize| finder.matrix(&naming.weight(index, part), [hidden, rows as u64]);
    Ok([find(names::QUERY, query)?, find(names::KEY, kv)?, find(names::VALUE, kv)?])
}

impl<'a> FeedForwardTensors<'a> {
    fn find(finder: &mut Finder<'a>, config: &DecoderConfig, index: usize) -> Result<Self, TensorError> {
        if let Some(experts) = &config.experts {
            return Self::find_experts(finder, config.hidden, experts, index);
        }
        let (naming, hidden, wide) = (finder.naming, config.hidden as u64, config.feed_forward);
        let name = |part: Name| naming.weight(index, part);
        if config.fused {
            let both = finder.matrix(&name(names::FUSED_GATE_UP), [hidden, 2 * wide as u64])?;
            let down = finder.matrix(&name(names::DOWN), [wide as u64, hidden])?;
            let gated = [both.rows(0..wide), both.rows(wide..2 * wide), down];
            return Ok(FeedForwardTensors::Dense(Box::new(gated)));
        }
        let parts = [names::GATE, names::UP, names::DOWN];
        find_gated(finder, index, parts, hidden, wide as u64).map(|gated| FeedForwardTensors::Dense(Box::new(gated)))
    }

    fn find_experts(
        finder: &mut Finder<'a>,
        hidden: usize,
        experts: &ExpertsConfig,
        index: usize,
    ) -> Result<Self, TensorError> {
        let (names, count, naming) = (experts.names, experts.count, finder.naming);
        let (hidden, wide) = (hidden as u64, experts.feed_forward as u64);
        let router = finder.router(&naming.weight(index, names.router), [hidden, count as u64])?;
        let gates = finder.experts(index, names.gate, [hidden, wide], count)?;
        let ups = finder.experts(index, names.up, [hidden, wide], count)?;
        let downs = finder.experts(index, names.down, [wide, hidden], count)?;
        let shared = match experts.shared_feed_forward {
            None => None,
            Some(wide) => {
                let gated = find_gated(finder, index, names.shared, hidden, wide as u64)?;
                Some((gated, finder.row(&naming.weight(index, names.shared_gate), hidden)?))
            }
        };
        let experts = gates.into_iter().zip(ups).zip(downs).map(|((gate, up), down)| [gate, up, down]).collect();
        Ok(FeedForwardTensors::Experts(Box::new(ExpertTensors { router, experts, shared })))
    }

    fn vector(&self) -> Option<&VectorTensor<'a>> {
        match self {
            FeedForwardTensors::Dense(_) => None,
            FeedForwardTensors::Experts(experts) => experts.shared.as_ref().map(|(_, gate)| gate),
        }
    }

    fn router(&self) -> Option<&MatrixTensor<'a>> {
        match self {
            FeedForwardTensors::Dense(_) => None,
            FeedForwardTensors::Experts(experts) => Some(&experts.router),
        }
    }

    fn products(&self) -> Vec<&MatrixTensor<'a>> {
        match self {
            FeedForwardTensors::Dense(gated) => gated.iter().collect(),
            FeedForwardTensors::Experts(tensors) => {
                let ExpertTensors { experts, shared, router: _ } = tensors.as_ref();
                experts.iter().flatten().chain(shared.iter().flat_map(|(gated, _)| gated)).collect()
            }
        }
    }

    /// The matrices whose columns are divided among ranks.
    fn downs(&self, whole_experts: bool) -> impl Iterator<Item = &MatrixTensor<'a>> {
        let gated: Vec<&GatedTensors<'a>> = match self {
            FeedForwardTensors::Dense(gated) => vec![gated],
            FeedForwardTensors::Experts(tensors) => {
                let divided = tensors.experts.iter().filter(|_| !whole_experts);
                divided.chain(tensors.shared.iter().map(|(gated, _)| gated)).collect()
            }
        };
        gated.into_iter().map(|[_, _, down]| down)
    }

    fn parts<'p>(&self, parts: &'p Parts) -> Vec<(&MatrixTensor<'a>, &'p Part)> {
        match self {
            FeedForwardTensors::Dense(gated) => gated.iter().zip(parts.feed_forward.each()).collect(),
            FeedForwardTensors::Experts(tensors) => {
                let ExpertTensors { router, experts, shared } = tensors.as_ref();
                let experts = &experts[parts.experts.clone()];
                let experts = experts.iter().flat_map(|gated| gated.iter().zip(parts.expert.each()));
                let shared = shared.iter().flat_map(|(gated, _)| gated.iter().zip(parts.shared_expert.each()));
                experts.chain(shared).chain([(router, &Part::Whole)]).collect()
            }
        }
    }

    fn load<L: WeightLoader<'a>>(
        &self,
        index: usize,
        loader: &L,
        parts: &Parts,
    ) -> Result<FeedForward<L::Device>, L::Error> {
        match self {
            FeedForwardTensors::Dense(gated) => {
                loader.gated(index, read_gated(gated, loader, &parts.feed_forward)?).map(FeedForward::Dense)
            }
            FeedForwardTensors::Experts(tensors) => tensors.load(index, loader, parts).map(FeedForward::Experts),
        }
    }
}

impl<'a> ExpertTensors<'a> {
    fn load<L: WeightLoader<'a>>(
        &self,
        index: usize,
        loader: &L,
        parts: &Parts,
    ) -> Result<<L::Device as Layout>::Experts, L::Error> {
        let ExpertTensors { router, experts, shared } = self;
        let router = router.read(loader, &Part::Whole)?;
        let held = experts[parts.experts.clone()].iter();
        let held = held.map(|gated| read_gated(gated, loader, &parts.expert)).collect::<Result<_, _>>()?;
        let shared = shared.as_ref().map(|(gated, gate)| {
            let gated = read_gated(gated, loader, &parts.shared_expert)?;
            Ok::<_, TensorError>((gated, gate.values(&Part::Whole)))
        });
        loader.experts(index, router, held, shared.transpose()?)
    }
}

fn find_gated<'a>(
    finder: &mut Finder<'a>,
    index: usize,
    [gate, up, down]: [Name; 3],
    hidden: u64,
    wide: u64,
) -> Result<GatedTensors<'a>, TensorError> {
    let naming = finder.naming;
    let mut find = |part: Name, dims: [u64; 2]| finder.matrix(&naming.weight(index, part), dims);
    Ok([find(gate, [hidden, wide])?, find(up, [hidden, wide])?, find(down, [wide, hidden])?])
}

fn read_gated<'a, L: WeightLoader<'a>>(
    [gate, up, down]: &GatedTensors<'a>,
    loader: &L,
    parts: &GatedParts,
) -> Result<GatedFiles<L::File>, TensorError> {
    Ok([gate.read(loader, &parts.gate)?, up.read(loader, &parts.gate)?, down.read(loader, &parts.down)?])
}
