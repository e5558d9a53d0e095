{{- define "windlass.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "windlass.selectorLabels" -}}
app.kubernetes.io/name: windlass-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "windlass.labels" -}}
{{ include "windlass.selectorLabels" . }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: windlass
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "windlass.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}{{ default (include "windlass.name" .) .Values.serviceAccount.name }}
{{- else }}{{ required "serviceAccount.name is needed when serviceAccount.create is false" .Values.serviceAccount.name }}{{ end }}
{{- end }}

{{- /*
The certificate of the Service {name} of this release, as the data of a Secret with its authority. It is made once and
kept: each upgrade finds it in the cluster. Where a rendering cannot look there, each makes another: existingSecret is
for that. To be asked for once in a rendering, for each answer is another.
*/ -}}
{{- define "windlass.certificate" -}}
{{- $old := (lookup "v1" "Secret" .root.Release.Namespace .name).data | default dict }}
{{- if hasKey $old "ca.crt" }}
{{- pick $old "ca.crt" "tls.crt" "tls.key" | toYaml }}
{{- else }}
{{- $host := printf "%s.%s.svc" .name .root.Release.Namespace }}
{{- $authority := genCA .name 3650 }}
{{- $pair := genSignedCert $host nil (list $host) 3650 $authority }}
{{- dict "ca.crt" ($authority.Cert | b64enc) "tls.crt" ($pair.Cert | b64enc) "tls.key" ($pair.Key | b64enc) | toYaml }}
{{- end }}
{{- end }}

{{- /* Secrets with these certificates, or those that whoever installs the chart has made. */ -}}
{{- define "windlass.customMetricsSecret" -}}
{{ default (printf "%s-custom-metrics" (include "windlass.name" .)) .Values.customMetrics.existingSecret }}
{{- end }}

{{- define "windlass.guardedMetricsSecret" -}}
{{ default (printf "%s-metrics" (include "windlass.name" .)) .Values.guardedMetrics.existingSecret }}
{{- end }}

{{- /* An image reference from {image, version}: the digest wins over the tag. */ -}}
{{- define "windlass.image" -}}
{{- if .image.digest }}{{ .image.repository }}@{{ .image.digest }}
{{- else }}{{ .image.repository }}:{{ default .version .image.tag }}{{ end }}
{{- end }}
