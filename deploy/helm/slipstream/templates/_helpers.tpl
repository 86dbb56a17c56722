{{/* Names, labels, and what is derived from values. A value that is null counts as not given. */}}

{{- define "slipstream.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "slipstream.selector" -}}
app: {{ include "slipstream.name" . }}
app.kubernetes.io/component: server
{{- end -}}

{{- define "slipstream.labels" -}}
{{ include "slipstream.selector" . }}
app.kubernetes.io/name: slipstream
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- with (.Values.kubernetes | default dict).labels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Parallelism by either of NVIDIA's names: JSON of tensor, pipeline, world, gpus (of a pod), nodes. */}}
{{- define "slipstream.parallelism" -}}
{{- $inner := (.Values.model.tensorrtLlm | default dict).parallelism | default dict -}}
{{- $outer := (.Values.tensorrtLLM | default dict).parallelism | default dict -}}
{{- $tensor := int (max (int ($inner.tensor | default 1)) (int ($outer.tensor | default 1))) -}}
{{- $pipeline := int (max (int ($inner.pipeline | default 1)) (int ($outer.pipeline | default 1))) -}}
{{- $world := mul $tensor $pipeline -}}
{{- if gt (int $world) 8 -}}
{{- fail (printf "tensor x pipeline is %d, more than the engine's 8 ranks" (int $world)) -}}
{{- end -}}
{{- $perNode := int (.Values.gpuPerNode | default 0) -}}
{{- $gpus := $world -}}
{{- $nodes := 1 -}}
{{- if and $perNode (gt (int $world) $perNode) -}}
{{- if ne (int (mod $world $perNode)) 0 -}}
{{- fail (printf "tensor x pipeline is %d, no multiple of gpuPerNode, %d" (int $world) $perNode) -}}
{{- end -}}
{{- $gpus = $perNode -}}
{{- $nodes = div $world $perNode -}}
{{- if ne (int (mod $perNode $tensor)) 0 -}}
{{- fail (printf "tensor is %d, which gpuPerNode, %d, is no multiple of: GPUs that share every matrix must be on one node" $tensor $perNode) -}}
{{- end -}}
{{- end -}}
{{- dict "tensor" $tensor "pipeline" $pipeline "gpus" (int $gpus) "nodes" (int $nodes) | toJson -}}
{{- end -}}

{{- define "slipstream.claim" -}}
{{- .Values.persistentVolumeClaim | default (printf "%s-models" (include "slipstream.name" .)) -}}
{{- end -}}

{{- define "slipstream.checkpoint" -}}
/checkpoints/{{ .Values.model.path | default .Values.model.name }}
{{- end -}}

{{/* A marker beside the checkpoint: the download is complete. */}}
{{- define "slipstream.marker" -}}
{{ include "slipstream.checkpoint" . }}/.complete-{{ .Values.model.download.revision | default "main" | sha256sum | trunc 12 }}
{{- end -}}

{{- define "slipstream.account" -}}
{{- $kubernetes := .Values.kubernetes | default dict -}}
{{- $kubernetes.serviceAccount | default (include "slipstream.name" .) -}}
{{- end -}}

{{- define "slipstream.container-security" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
readOnlyRootFilesystem: true
{{- end -}}

{{- define "slipstream.pod-security" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "slipstream.pull-secrets" -}}
{{- $secrets := .Values.triton.image.pullSecrets | default list -}}
{{- if .Values.pullSecret }}{{ $secrets = append $secrets (dict "name" .Values.pullSecret) }}{{ end -}}
{{- with $secrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The metrics that scale: `autoscaling.metric` takes the place of the first. JSON of a list. */}}
{{- define "slipstream.metrics" -}}
{{- $metrics := .Values.autoscaling.metrics -}}
{{- with .Values.autoscaling.metric -}}
{{- if or .name .value -}}
{{- $first := first $metrics -}}
{{- $name := .name | default $first.name -}}
{{- $query := eq $name $first.name | ternary $first.query $name -}}
{{- $one := dict "name" $name "value" (.value | default $first.value) "query" $query -}}
{{- $metrics = prepend (rest $metrics) $one -}}
{{- end -}}
{{- end -}}
{{- dict "metrics" $metrics | toJson -}}
{{- end -}}
